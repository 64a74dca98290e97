"""What a student and a teacher have in common, and the student."""

from typing import Literal

from pydantic import Field

from nemo_opd.config.base import Frozen, Settings
from nemo_opd.config.optim import AdamW, Scheduler


class Model(Settings):
    model: str
    """A Hugging Face folder, hub name, or `demo:student`."""
    tokenizer: str | None = None
    """Where the tokenizer is, when not with the model."""
    chat_template: str | None = None
    """A file with the chat template (Jinja), when the tokenizer has none or another is wanted."""
    chat_template_kwargs: Frozen[str, bool | int | float | str | None] = Field(default_factory=dict)
    """What the template is given besides the conversation, such as `enable_thinking: false`."""

    @property
    def tokenizer_source(self) -> tuple[str, str]:
        """The key and the value that name the tokenizer."""
        return ("model", self.model) if self.tokenizer is None else ("tokenizer", self.tokenizer)


class Student(Model):
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute precision; master weights are fp32 in any case. auto: bfloat16 on GPU, float32 on CPU."""
    offload: bool = False
    """Move parameters and optimizer state to host memory while the teachers run."""
    activation_checkpointing: bool = False
    """Keep only each layer's input, and compute the layer again in the backward pass: a third more work, and far less
    memory for long sequences.
    """
    optimizer: AdamW = Field(default_factory=AdamW)
    scheduler: Scheduler = Field(default_factory=Scheduler)
