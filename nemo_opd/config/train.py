"""The training loop."""

from datetime import timedelta
from typing import Annotated, Literal

from pydantic import Field, model_validator

from nemo_opd.config.base import Settings


class ChosenMetric(Settings):
    metric: str
    """Metric of validation or evaluation as it is logged, such as `val/bits_per_byte` or `eval/pass@1`."""
    mode: Literal["max", "min"]
    """Whether larger or smaller values are better."""

    def is_better(self, value: float, than: float) -> bool:
        return value > than if self.mode == "max" else value < than


class KeepBest(ChosenMetric):
    """Checkpoints with the best values of a metric."""

    n: int = Field(1, ge=1)
    """Checkpoints that are kept."""


class EarlyStopping(ChosenMetric):
    """End of a run whose metric gets no better."""

    patience: int = Field(3, ge=1)
    """Values in a row that are no better than the best one before, after which the run ends."""
    min_delta: float = Field(0, ge=0)
    """Smallest difference that counts as better."""


class Train(Settings):
    """Steps, batches and checkpoints."""

    max_steps: int | None = Field(None, ge=1)
    """Optimizer steps; given by `epochs` and the data when not set."""
    epochs: int | None = Field(None, ge=1)
    """Passes over the training data."""
    global_batch_size: int = Field(64, ge=1)
    """Sequences in an optimizer step, over all ranks; with `data.packing` rows of `max_length` tokens, of several."""
    micro_batch_size: int = Field(1, ge=1)
    """Sequences of `max_length` in one forward and backward pass of a rank; more of shorter ones."""
    micro_batch_tokens: int | None = Field(None, ge=2)
    """Tokens in one forward and backward pass of a rank; by default `micro_batch_size` · `max_length`.

    A sequence longer than this is a microbatch by itself. Padding counts for models that read it.
    """
    max_length: int = Field(2048, ge=2)
    """Longest sequence in the student's tokens; longer documents are cut, with `data.packing` into several."""
    validate_every: int | None = Field(None, ge=1)
    """Steps between validations; null: before the first and after the last step alone, as in any case. A run whose
    `data.validation` names nothing has none: `data.validation.arrow_files=[] data.validation.max_samples=null`.
    """
    save_every: int | None = Field(None, ge=1)
    """Steps between checkpoints; after the last step in any case."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints that are kept."""
    async_save: bool = False
    """Write the training state while training goes on, from a copy in the host's memory: 12 bytes for each trained
    parameter on a rank, divided by the ranks that shard it. The model in Hugging Face form is written before.
    """
    keep_best: KeepBest | None = None
    """Save a checkpoint whenever a metric is among its `n` best values, and keep those in addition to `keep_last`; at
    the end `best/` is the student of the best one.
    """
    early_stopping: EarlyStopping | None = None
    """End the run, as after its last step, when a metric has not become better for a while."""
    save_before: Annotated[timedelta, Field(gt=timedelta())] | None = None
    """Time since the start of the job, as `03:45:00`, before which the run saves a checkpoint and ends, with exit
    status 0. Steps, evaluations and checkpoints are expected to take as long as the longest until then.
    """
    gradient_clip: float | None = Field(1.0, gt=0)
    """Largest norm of the gradient."""
    compile_losses: bool | None = None
    """Compute losses by Triton kernels, or compile their functions of rows with `torch.compile`; by default on GPUs.

    Either takes some seconds at the start. On a CPU, which has no Triton, it needs a C++ compiler.
    """
    max_skipped_steps: int = Field(5, ge=1)
    """Number of consecutive steps, skipped because loss or gradient is not finite, after which the run fails."""

    @property
    def tokens_at_a_time(self) -> int:
        """`micro_batch_tokens`, or its default."""
        return self.micro_batch_tokens or self.micro_batch_size * self.max_length

    def longest_at_a_time(self, data_parallel: int) -> int:
        """Return the sequences of `max_length` in a microbatch: at most those that a rank has of a global batch."""
        return min(-(-self.tokens_at_a_time // self.max_length), -(-self.global_batch_size // data_parallel))

    @model_validator(mode="after")
    def steps_or_epochs(self) -> "Train":
        if self.max_steps is None and self.epochs is None:
            raise ValueError("neither max_steps nor epochs is set, so the run has no end; set one of them")
        if self.max_steps is not None and self.epochs is not None:
            raise ValueError(
                f"max_steps={self.max_steps} and epochs={self.epochs} are both set, and only one can hold; write "
                "train.max_steps=null or train.epochs=null"
            )
        return self
