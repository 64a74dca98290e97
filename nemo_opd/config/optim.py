"""Optimizer and learning-rate schedule of the student."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from nemo_opd.config.base import Settings

Decay = Annotated[float, Field(ge=0, lt=1)]


class AdamW(Settings):
    """AdamW over all weights that are trained."""

    type: Literal["adamw"] = "adamw"
    """torch.optim.AdamW."""
    lr: float = Field(5e-5, gt=0)
    """Peak learning rate."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """Decay rates of the moving averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update."""
    weight_decay: float = Field(1e-3, ge=0)
    """A step subtracts lr · weight_decay · w from every trained weight w, biases and norms too."""


class Scheduler(Settings):
    """Learning rate over the steps."""

    type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up, over the rest of `train.max_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear rise from zero."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Learning rate at the end, as a share of the peak (cosine only)."""

    @model_validator(mode="after")
    def min_lr_ratio_needs_cosine(self) -> "Scheduler":
        if self.min_lr_ratio and self.type != "cosine":
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio:g} has no effect with type={self.type}; write type=cosine, or leave "
                "min_lr_ratio out"
            )
        return self
