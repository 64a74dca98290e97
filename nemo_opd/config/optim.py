"""Optimizer and learning-rate schedule of the student."""

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from nemo_opd.config.base import Settings

_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerBase(Settings):
    lr: float = Field(5e-5, gt=0)
    """Peak learning rate."""


class Decoupled(OptimizerBase):
    weight_decay: float = Field(1e-3, ge=0)
    """Each step subtracts lr · weight_decay · w from every trained weight w, biases and norms too."""


class Adam(Decoupled):
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay rates of the moving averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update."""


class AdamW(Adam):
    """torch.optim.AdamW over all trained weights."""

    type: Literal["adamw"] = "adamw"


class AdamW8bit(Adam):
    """AdamW of bitsandbytes with 8-bit moments in blocks of 256 numbers (matrices of 4096 numbers or more), for a
    student on one rank.
    """

    type: Literal["adamw_8bit"] = "adamw_8bit"


class Muon(Adam):
    """torch.optim.Muon (momentum with orthogonalized updates) for the matrices of the decoder layers; AdamW with
    `betas` and `eps` for embeddings, head, norms and biases.
    """

    type: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the moving sum of a matrix's gradients."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton–Schulz iterations of the orthogonalization."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of lr for an A × B matrix: 0.2 · √max(A, B), which suits AdamW's lr and weight_decay, or √max(1, A / B).
    """
    others_lr: float | None = Field(None, gt=0)
    """Peak learning rate of AdamW; by default lr."""


class Adafactor(Decoupled):
    """torch.optim.Adafactor, which keeps mean squares per row and column of a matrix instead of per weight; for a
    student on one rank.
    """

    type: Literal["adafactor"] = "adafactor"
    beta2_decay: float = Field(-0.8, lt=0)
    """Exponent in the decay rate of the mean squares: 1 − step ** beta2_decay."""
    clip: float = Field(1.0, gt=0)
    """Largest root mean square of an update, before the factor lr."""


class ClassOptimizer(OptimizerBase):
    """Any class derived from torch.optim.Optimizer."""

    type: Literal["class"] = "class"
    name: str = Field(pattern=r"^[\w.]+:\w+$")
    """`package.module:Class`, called with the trained parameters, `lr` and `arguments`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, such as `{momentum: 0.9}`."""
    sharded: bool = False
    """Declare that the class works on sharded parameters (DTensor): its update is elementwise, or uses only operations
    that DTensor supports. Needed on more than one rank.
    """


Optimizer = Annotated[AdamW | AdamW8bit | Muon | Adafactor | ClassOptimizer, Field(discriminator="type")]


class Scheduler(Settings):
    """Learning rate over the steps."""

    type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up, over the remaining steps of `train.max_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear increase from zero."""
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak (cosine only)."""

    @model_validator(mode="after")
    def min_lr_ratio_needs_cosine(self) -> "Scheduler":
        if self.min_lr_ratio and self.type != "cosine":
            raise ValueError(
                f"min_lr_ratio={self.min_lr_ratio:g} has no effect with type={self.type}; write type=cosine, or leave "
                "min_lr_ratio out"
            )
        return self
