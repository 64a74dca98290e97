"""Low-rank adapters that the student trains instead of its weights."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import Settings

ALL_LINEAR: Literal["all-linear"] = "all-linear"

_ModuleNames = Annotated[tuple[str, ...], Field(min_length=1)]


class Lora(Settings):
    """y = W x + alpha / rank · B A x, with W frozen and A and B trained (Hu et al. 2021)."""

    rank: int = Field(16, ge=1)
    """Rows of A and columns of B."""
    alpha: int = Field(32, ge=1)
    """An adapter's output is scaled by alpha / rank."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Share of an adapter's inputs that are zeroed at random in training."""
    target_modules: Literal["all-linear"] | _ModuleNames = ALL_LINEAR
    """Linear layers with an adapter, by the ends of their names, such as [q_proj, v_proj]. all-linear: all except the
    head.
    """
    export: Literal["merged", "adapter"] = "merged"
    """Form of `student` in checkpoints and of `final`. merged: a complete model. adapter: a folder for `peft`, which
    needs the base model.
    """
