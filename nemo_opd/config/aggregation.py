"""Aggregation of several teachers' losses (methods.md §6)."""

from typing import Annotated, Literal

from pydantic import Field, ValidationInfo, field_validator

from nemo_opd.config.base import Settings

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
    """static: each teacher's weight. Otherwise softmax_i(alpha · score_i + log weight_i) in each sequence. The score is
    the negative bits per byte, the negative entropy per byte, or the mean largest probability per byte.
    """
    alpha: float = Field(1.0, gt=0)
    """Sharpness of weights that are not static."""
    vocabulary_scaling: bool = False
    """Multiply each weight by log W_i / log min_j W_j, for vocabularies of size W."""

    @field_validator("alpha")
    @classmethod
    def alpha_needs_scores(cls, alpha: float, info: ValidationInfo) -> float:
        if info.data.get("weights") == "static" and alpha != cls.model_fields["alpha"].default:
            raise ValueError(
                f"{alpha:g} has no effect with weights=static; choose weights=bits_per_byte, entropy or "
                "max_probability, or leave alpha out"
            )
        return alpha

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
