"""How a teacher's output reaches the student."""

from typing import Literal

from nemo_opd.config.base import Settings


class LogitsHandoff(Settings):
    """Full-vocabulary logits in bf16 in a buffer that persists across steps."""

    type: Literal["logits"] = "logits"
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = "auto"
    """auto: cuda_ipc on GPU, shared_memory on CPU."""
