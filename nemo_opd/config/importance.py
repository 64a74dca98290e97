"""Importance weights of sampled tokens."""

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator

from nemo_opd.config.base import Settings


class ImportanceSettings(Settings):
    """Bounds on the mismatch between the trained and the sampling policy, by the weight π_train / π_behaviour: the
    student's probability of a token over its sampling probability, with temperature, top-k and top-p (methods.md §11).
    """

    importance_cap: float | None = Field(None, gt=0)
    """Upper bound of the weights, or null for no bound."""
    importance_level: Literal["token", "sequence"] = "token"
    """Unit of a weight: each token (chunk, for a teacher with another tokenizer), or all sampled tokens of a sequence
    together, which needs an `importance_cap` and one more product with the head.
    """
    importance_veto: float | None = Field(None, gt=0, lt=1)
    """Drop sequences with a token below this weight, as the engine sampled something that the student considers
    impossible, or none if null. Needs one more product with the head.
    """

    @field_validator("importance_level")
    @classmethod
    def weights_of_sequences_need_a_cap(cls, level: str, info: ValidationInfo) -> str:
        if level == "sequence" and "importance_cap" in info.data and info.data["importance_cap"] is None:
            raise ValueError(
                "sequence without importance_cap: a product over hundreds of tokens has no bound; give "
                "importance_cap, such as 2, or leave importance_level out"
            )
        return level
