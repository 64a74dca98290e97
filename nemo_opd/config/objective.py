"""The objective of a run: a loss of its teachers, and cross-entropy."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import Settings
from nemo_opd.config.importance import ImportanceSettings
from nemo_opd.config.loss import (
    ALMTerm,
    BytePrefixTerm,
    DivergenceKind,
    DivergenceTerm,
    FunctionTerm,
    GoldTerm,
    HKLTerm,
    PKLTerm,
    SameVocabTerm,
    SampledKLTerm,
    SharedPrefixTerm,
    StrictTerm,
    TCADTerm,
    ULDTerm,
)


class Objective(Settings):
    """kd_weight · KD + ce_weight · CE (methods.md §7.3)."""

    kd_weight: float = Field(1.0, ge=0)
    """Weight of KD, the distillation loss; at 0 no teacher is loaded."""
    ce_weight: float = Field(1.0, ge=0)
    """Weight of CE, the cross-entropy of the dataset's tokens."""
    scaling: Literal["fixed", "dynamic"] = "fixed"
    """dynamic: KD is also scaled by EMA(CE)/EMA(KD), over the steps before that had both."""
    scaling_decay: float = Field(0.99, gt=0, lt=1)
    """dynamic: decay of these moving averages."""
    scaling_cap: float = Field(100.0, gt=0, allow_inf_nan=False)
    """dynamic: largest scale. A KD below 1/scaling_cap of CE has next to nothing left to teach, and to bring that up to
    CE would multiply noise.
    """


class SameVocabLoss(Objective, SameVocabTerm):
    """same_vocab for every teacher without its own loss."""


class PKLLoss(Objective, PKLTerm):
    """p_kl for every cross-tokenizer teacher without its own loss; same_vocab for the others."""


class GoldLoss(Objective, GoldTerm):
    """gold for every cross-tokenizer teacher without its own loss; same_vocab for the others."""


class HKLLoss(Objective, HKLTerm):
    """h_kl for every cross-tokenizer teacher without its own loss; same_vocab for the others."""


class StrictLoss(Objective, StrictTerm):
    """strict for every cross-tokenizer teacher without its own loss; same_vocab for the others."""


class BytePrefixLoss(Objective, BytePrefixTerm):
    """byte_prefix for every cross-tokenizer teacher without its own loss; same_vocab for the others."""


class SharedPrefixLoss(Objective, SharedPrefixTerm):
    """shared_prefix for every cross-tokenizer teacher without its own loss; same_vocab for the others."""


class ALMLoss(Objective, ALMTerm):
    """alm for every cross-tokenizer teacher without its own loss; the others have forward KL."""


class ULDLoss(Objective, ULDTerm):
    """uld for every cross-tokenizer teacher without its own loss; the others have forward KL."""


class TCADLoss(Objective, TCADTerm):
    """tcad for every teacher without its own loss."""


class SampledKLLoss(Objective, SampledKLTerm):
    """sampled_kl for every teacher without its own loss."""


class FunctionLoss(Objective, FunctionTerm):
    """Your own formula for every teacher without its own loss."""


class GRPOLoss(Objective, DivergenceTerm, ImportanceSettings):
    """Rewards compared within the rollouts of a prompt; teachers with a weight add a KL."""

    type: Literal["grpo"] = "grpo"
    kd_weight: float = Field(0.0, ge=0)
    """Weight of KD, the distillation loss; at 0 no teacher is loaded."""
    ce_weight: float = Field(0.0, ge=0)
    """Weight of CE, the cross-entropy of the dataset's tokens."""
    divergence: DivergenceKind = "reverse_kl"
    """Divergence of KD, as in other losses (methods.md §3.1)."""
    policy_weight: float = Field(1.0, gt=0)
    """Weight of the policy gradient."""
    clip_low: float = Field(0.2, ge=0, lt=1)
    """The ratio to the model that sampled is clipped below at 1 − clip_low."""
    clip_high: float = Field(0.28, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(3.0, gt=1)
    """Upper bound of the ratio where the advantage is negative; null: no bound."""
    scale_advantages: bool = True
    """Divide by the standard deviation of the rewards within a prompt."""


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
    | ALMLoss
    | ULDLoss
    | FunctionLoss,
    Field(discriminator="type"),
]
