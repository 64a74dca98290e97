"""Losses: what is compared with a teacher, and the objective it is part of."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class DivergenceTerm(Settings):
    """What every distillation term chooses (METHODS §3)."""

    divergence: Literal["forward_kl", "reverse_kl", "jsd", "mixed", "tvd"] = "forward_kl"
    beta: float = Field(0.5, ge=0, le=1)
    """jsd: 0 is forward KL, 1 is reverse KL."""
    mixed_weight: float = Field(0.5, ge=0, le=1)
    """mixed: the share of forward KL."""
    temperature: float = Field(1.0, gt=0)
    """Applied to both sides; the term is multiplied by its square."""


class SameVocabTerm(DivergenceTerm):
    """A divergence per position, for a teacher with the student's tokenizer (METHODS §4)."""

    type: Literal["same_vocab"] = "same_vocab"


class PKLTerm(DivergenceTerm):
    """The student projected onto the teacher's vocabulary at each chunk's first position (METHODS §5)."""

    type: Literal["p_kl"] = "p_kl"
    coverage_coef: float = Field(1.0, ge=0)
    """Weight of −log of the student's mass on covered teacher columns."""


LossTerm = Annotated[SameVocabTerm | PKLTerm, Field(discriminator="type")]


class Objective(Settings):
    """kd_weight · KD + ce_weight · CE (METHODS §7)."""

    kd_weight: float = Field(1.0, ge=0)
    ce_weight: float = Field(1.0, ge=0)
    scaling: Literal["fixed", "dynamic"] = "fixed"
    """dynamic: KD is also scaled by a moving average of CE/KD over the steps before."""
    scaling_decay: float = Field(0.99, gt=0, lt=1)
    """dynamic: decay of that moving average."""


class SameVocabLoss(Objective, SameVocabTerm):
    """same_vocab for every teacher that names no loss of its own."""


class PKLLoss(Objective, PKLTerm):
    """p_kl for every cross-tokenizer teacher that names no loss of its own; same_vocab for the others."""


Loss = Annotated[SameVocabLoss | PKLLoss, Field(discriminator="type")]
