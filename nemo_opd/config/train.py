"""Training steps, the optimizer and its schedule."""

from datetime import timedelta
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, field_validator, model_validator

from nemo_opd.config.settings import MayChange, Needs, Settings, UsersCode


class ChosenMetric(Settings):
    metric: str
    """Metric of validation or evaluation, by its logged name, such as `val/bits_per_byte` or `eval/gsm8k/pass@1`."""
    mode: Literal["max", "min"]
    """Whether larger or smaller values are better."""

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.mode == "max" else value < than


class KeepBest(ChosenMetric):
    """Checkpoints with the best values of a metric."""

    n: int = Field(1, ge=1)
    """Number of checkpoints to keep."""


class EarlyStopping(ChosenMetric):
    """End of a run whose metric stops improving."""

    patience: int = Field(3, ge=1)
    """End the run after this many consecutive values without improvement over the best one."""
    min_delta: float = Field(0, ge=0)
    """Smallest difference that counts as an improvement."""


class Train(Settings):
    """Steps, batches and checkpoints."""

    max_steps: MayChange[int | None] = Field(None, ge=1)
    """Optimizer steps; by default derived from `epochs` and the data."""
    epochs: MayChange[int | None] = Field(None, ge=1)
    """Passes over the training data."""
    global_batch_size: int = Field(64, ge=1)
    """Sequences in an optimizer step, over all ranks; with `data.packing`, rows of `max_length` tokens."""
    micro_batch_size: MayChange[int] = Field(1, ge=1)
    """Sequences of `max_length` in one forward and backward pass of a rank; more if they are shorter. The default needs
    the least memory; a dry run shows what more would need.
    """
    micro_batch_tokens: MayChange[int | None] = Field(None, ge=2)
    """Tokens in one forward and backward pass of a rank; by default `micro_batch_size` · `max_length`. A longer
    sequence is a microbatch by itself.
    """
    max_length: int = Field(2048, ge=2)
    """Longest sequence in the student's tokens; longer documents are cut, with `data.packing` into several pieces."""
    validate_every: MayChange[int | None] = Field(None, ge=1)
    """Steps between validations, besides those before the first and after the last step. `data.validation=null` turns
    validation off.
    """
    save_every: MayChange[int | None] = Field(500, ge=1)
    """Steps between checkpoints, or null for none before the last step, which is always saved."""
    keep_last: MayChange[int] = Field(2, ge=1)
    """Number of newest checkpoints to keep."""
    async_save: MayChange[bool] = False
    """Write the training state while training goes on, from a copy in host memory: 12 bytes per trained parameter,
    divided by the ranks that shard it.
    """
    keep_best: MayChange[KeepBest | None] = None
    """Keep the checkpoints of the `n` best values of a metric besides `keep_last`; at the end `best/` is the student of
    the best one.
    """
    early_stopping: MayChange[EarlyStopping | None] = None
    """End the run, as after its last step, when a metric has stopped improving."""
    save_before: MayChange[timedelta | None] = None
    """Time since the start of the job, as `03:45:00`, before which the run saves a checkpoint and ends with exit status
    75 (docs/checkpoints.md).
    """
    gradient_clip: float | None = Field(1.0, gt=0)
    """Largest norm of the gradient, or null for no clipping."""
    compile_losses: MayChange[bool | None] = None
    """Compute losses with Triton kernels or `torch.compile`; by default on GPUs. On a CPU it needs a C++ compiler."""
    max_skipped_steps: MayChange[int] = Field(5, ge=1)
    """Fail after this many consecutive steps that were skipped because loss or gradient was not finite."""

    @property
    def tokens_at_a_time(self) -> int:
        """`micro_batch_tokens`, or its default."""
        return self.micro_batch_tokens or self.micro_batch_size * self.max_length

    def longest_at_a_time(self, data_parallel: int) -> int:
        """Return the number of sequences of `max_length` in a microbatch, at most a rank's share of a global batch."""
        return min(-(-self.tokens_at_a_time // self.max_length), -(-self.global_batch_size // data_parallel))

    @field_validator("save_before", mode="wrap")
    @classmethod
    def save_before_is_a_time(cls, value: object, validate: ValidatorFunctionWrapHandler) -> timedelta | None:
        try:
            time: timedelta | None = validate(value)
        except ValidationError:
            time = timedelta()
        if time is not None and time <= timedelta():
            raise ValueError("must be a time above 0, such as 03:45:00, or a number of seconds")
        return time

    @model_validator(mode="after")
    def either_steps_or_epochs(self) -> "Train":
        if self.max_steps is None and self.epochs is None:
            raise ValueError("neither max_steps nor epochs is set, so the run has no end; set one of them")
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError(
                f"max_steps={self.max_steps} and epochs={self.epochs} are both set, and only one can hold; write "
                "train.max_steps=null or train.epochs=null"
            )
        return self


_Decay = Annotated[float, Field(ge=0, lt=1)]


class OptimizerBase(Settings):
    lr: float = Field(5e-5, gt=0)
    """Peak learning rate."""


class Decoupled(OptimizerBase):
    weight_decay: float = Field(1e-3, ge=0)
    """Each step subtracts lr · weight_decay · w from every trained weight w, biases and norms too: with the defaults,
    less than 0.05 % of it in 10,000 steps.
    """


class Adam(Decoupled):
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay rates of the moving averages of the gradient and of its square."""
    eps: float = Field(1e-8, gt=0)
    """Added to the denominator of the update."""


class AdamW(Adam):
    """torch.optim.AdamW over all trained weights."""

    type: Literal["adamw"] = "adamw"


class AdamW8bit(Adam):
    """AdamW of bitsandbytes with 8-bit moments, for a student on one rank."""

    type: Literal["adamw_8bit"] = "adamw_8bit"


class Muon(Adam):
    """torch.optim.Muon (momentum with orthogonalized updates) for the matrices of the decoder layers; AdamW with
    `betas` and `eps` for all other weights.
    """

    type: Literal["muon"] = "muon"
    momentum: float = Field(0.95, ge=0, lt=1)
    """Decay rate of the moving sum of a matrix's gradients."""
    nesterov: bool = True
    """Nesterov momentum."""
    ns_steps: int = Field(5, ge=1, lt=100)
    """Newton–Schulz iterations of the orthogonalization."""
    adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of lr for an A × B matrix: 0.2 · √max(A, B), which suits AdamW's lr, or √max(1, A / B)."""
    others_lr: float | None = Field(None, gt=0)
    """Peak learning rate of AdamW; by default lr."""


class Adafactor(Decoupled):
    """torch.optim.Adafactor, with mean squares per row and column of a matrix; for a student on one rank."""

    type: Literal["adafactor"] = "adafactor"
    beta2_decay: float = Field(-0.8, lt=0)
    """Exponent in the decay rate of the mean squares: 1 − step ** beta2_decay."""
    clip: float = Field(1.0, gt=0)
    """Largest root mean square of an update, before the factor lr."""


class ClassOptimizer(OptimizerBase):
    """Any class derived from torch.optim.Optimizer."""

    type: Literal["class"] = "class"
    name: UsersCode
    """`package.module:Class`, called with the trained parameters, `lr` and `arguments`."""
    arguments: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the class, such as `{momentum: 0.9}`."""
    sharded: bool = False
    """Declare that the class works on sharded parameters (DTensor). Needed on more than one rank."""


Optimizer = Annotated[AdamW | AdamW8bit | Muon | Adafactor | ClassOptimizer, Field(discriminator="type")]


class Scheduler(Settings):
    """Learning rate over the steps."""

    type: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape after the warm-up, over the remaining steps of `train.max_steps`."""
    warmup_steps: int = Field(0, ge=0)
    """Steps of linear increase from zero; by default none, as in TRL and transformers."""
    min_lr_ratio: Annotated[float, Needs("type", ("cosine",))] = Field(0.0, ge=0, le=1)
    """Final learning rate as a share of the peak (cosine only)."""
