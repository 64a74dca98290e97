"""The objective of a run: distillation losses, their aggregation (methods.md §6), and cross-entropy."""

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from nemo_opd.config.loss import (
    ALMTerm,
    BytePrefixTerm,
    DivergenceKind,
    DivergenceTerm,
    ESCDTerm,
    FunctionTerm,
    GoldTerm,
    HKLTerm,
    ImportanceSettings,
    PKLTerm,
    SameVocabTerm,
    SampledKLTerm,
    SharedPrefixTerm,
    StrictTerm,
    TCADTerm,
    ULDTerm,
)
from nemo_opd.config.settings import Needs, Settings

_Dynamic = Needs("scaling", ("dynamic",))


class Objective(Settings):
    """kd_weight · KD + ce_weight · CE (methods.md §7.3)."""

    kd_weight: float = Field(1.0, ge=0)
    """Weight of KD, the distillation loss; at 0 no teacher is loaded."""
    ce_weight: float = Field(1.0, ge=0)
    """Weight of CE, the cross-entropy of the dataset's tokens. On-policy there are such tokens only with
    rollout.on_policy_share below 1: a sampled token is never a target of CE.
    """
    scaling: Literal["fixed", "dynamic"] = "fixed"
    """dynamic: also scale KD by EMA(CE)/EMA(KD), over previous steps that had both."""
    scaling_decay: Annotated[float, _Dynamic] = Field(0.99, gt=0, lt=1)
    """dynamic: decay of the moving averages."""
    scaling_cap: Annotated[float, _Dynamic] = Field(100.0, gt=0, allow_inf_nan=False)
    """dynamic: largest scale, so that noise is not amplified when KD is almost 0."""


class SameVocabLoss(Objective, SameVocabTerm):
    """same_vocab for every teacher without its own loss."""


class PKLLoss(Objective, PKLTerm):
    """p_kl for cross-tokenizer teachers without their own loss; same_vocab for same-tokenizer teachers."""


class GoldLoss(Objective, GoldTerm):
    """gold for cross-tokenizer teachers without their own loss; same_vocab for same-tokenizer teachers."""


class HKLLoss(Objective, HKLTerm):
    """h_kl for cross-tokenizer teachers without their own loss; same_vocab for same-tokenizer teachers."""


class StrictLoss(Objective, StrictTerm):
    """strict for cross-tokenizer teachers without their own loss; same_vocab for same-tokenizer teachers."""


class BytePrefixLoss(Objective, BytePrefixTerm):
    """byte_prefix for cross-tokenizer teachers without their own loss; same_vocab for same-tokenizer teachers."""


class SharedPrefixLoss(Objective, SharedPrefixTerm):
    """shared_prefix for cross-tokenizer teachers without their own loss; same_vocab for same-tokenizer teachers."""


class ESCDLoss(Objective, ESCDTerm):
    """escd for cross-tokenizer teachers without their own loss; same_vocab for same-tokenizer teachers."""


class ALMLoss(Objective, ALMTerm):
    """alm for cross-tokenizer teachers without their own loss; forward KL for same-tokenizer teachers."""


class ULDLoss(Objective, ULDTerm):
    """uld for cross-tokenizer teachers without their own loss; forward KL for same-tokenizer teachers."""


class TCADLoss(Objective, TCADTerm):
    """tcad for every teacher without its own loss."""


class SampledKLLoss(Objective, SampledKLTerm):
    """sampled_kl for every teacher without its own loss."""


class FunctionLoss(Objective, FunctionTerm):
    """Your own formula for every teacher without its own loss."""


class GRPOLoss(Objective, DivergenceTerm, ImportanceSettings):
    """Rewards compared among the rollouts of a prompt; teachers with a weight add a KL."""

    type: Literal["grpo"] = "grpo"
    take: ClassVar[str] = "for rewards, with or without a teacher"
    kd_weight: float = Field(0.0, ge=0)
    """Weight of KD, the distillation loss; at 0 no teacher is loaded."""
    ce_weight: float = Field(0.0, ge=0)
    """Weight of CE, the cross-entropy of the dataset's tokens."""
    divergence: DivergenceKind = "reverse_kl"
    """Divergence of KD, as in other losses (methods.md §3.1)."""
    policy_weight: float = Field(1.0, gt=0)
    """Weight of the policy gradient."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """Lower clipping bound of the ratio to the sampling model: 1 − clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """Upper clipping bound of the ratio: 1 + clip_high."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Upper bound of the ratio for negative advantages, or null for no bound."""
    scale_advantages: bool = True
    """Divide advantages by the standard deviation of the prompt's rewards."""


Loss = Annotated[
    SameVocabLoss
    | TCADLoss
    | SampledKLLoss
    | GRPOLoss
    | PKLLoss
    | GoldLoss
    | HKLLoss
    | StrictLoss
    | BytePrefixLoss
    | SharedPrefixLoss
    | ESCDLoss
    | ALMLoss
    | ULDLoss
    | FunctionLoss,
    Field(discriminator="type"),
]


Score = Literal["bits_per_byte", "entropy", "max_probability"]
"""A teacher's confidence in a sequence, on its own tokens and per byte, which makes tokenizers comparable."""


class AggregationBase(Settings):
    @property
    def score(self) -> Score | None:
        """Score that is needed of each teacher and sequence before the student's step, if any."""
        return None


class WeightedSum(AggregationBase):
    """Σ weight_i · KD_i."""

    type: Literal["weighted_sum"] = "weighted_sum"
    weights: Literal["static", "bits_per_byte", "entropy", "max_probability"] = "static"
    """static: each teacher's weight. Otherwise softmax_i(alpha · score_i + log weight_i) in each sequence (methods.md
    §6.1).
    """
    alpha: Annotated[float, Needs("weights", ("bits_per_byte", "entropy", "max_probability"))] = Field(1.0, gt=0)
    """Sharpness of weights that are not static."""
    vocabulary_scaling: bool = False
    """Multiply each weight by log W_i / log min_j W_j, for vocabularies of size W."""

    @property
    def score(self) -> Score | None:
        return None if self.weights == "static" else self.weights


class AveragedLogits(AggregationBase):
    """One divergence from the weighted mean of the teachers' logits."""

    type: Literal["averaged_logits"] = "averaged_logits"


class SelectTeacher(AggregationBase):
    """The KD of the one teacher with the fewest bits per byte."""

    type: Literal["select_teacher"] = "select_teacher"
    per: Literal["sequence", "batch"] = "sequence"
    """Select a teacher for each sequence, or once for a global batch."""

    @property
    def score(self) -> Score | None:
        return "bits_per_byte"


class Routed(AggregationBase):
    """The KD of the one teacher that the data name for each sample."""

    type: Literal["routed"] = "routed"
    key: str = "teacher"
    """The column with the teacher's name."""


Aggregation = Annotated[WeightedSum | AveragedLogits | SelectTeacher | Routed, Field(discriminator="type")]
