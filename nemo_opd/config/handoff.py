"""Handoff of a teacher's output to the student."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class HandoffBase(Settings):
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = "auto"
    """auto: on CPUs shared_memory; on GPUs cuda_ipc, and where a try before the run finds that processes cannot read
    each other's GPU memory, shared_memory, with a warning. shared_memory on GPUs is pinned main memory, which each
    microbatch is copied through.
    """


class HiddenStatesHandoff(HandoffBase):
    """Final hidden states, and once the head; the student makes logits of them a chunk at a time."""

    type: Literal["hidden_states"] = "hidden_states"


class LogitsHandoff(HandoffBase):
    """Full-vocabulary logits: the reference, for any head."""

    type: Literal["logits"] = "logits"


Handoff = Annotated[HiddenStatesHandoff | LogitsHandoff, Field(discriminator="type")]
