"""The student model."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Settings
from nemo_opd.config.optim import AdamW, Scheduler


class Student(Settings):
    model: str
    """A Hugging Face folder, hub name, or `demo:student`."""
    tokenizer: str | None = None
    """Where the tokenizer is, when not with the model."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision; master weights are fp32 in any case. auto: bfloat16 on GPU, float32 on CPU."""
    offload: bool = False
    """Move parameters and optimizer state to host memory while the teachers run."""
    optimizer: AdamW = Field(default_factory=AdamW)
    scheduler: Scheduler = Field(default_factory=Scheduler)
