"""Handoff of a teacher's output to the student."""

from typing import Annotated, Literal

from pydantic import Field

from nemo_opd.config.base import Settings


class HandoffBase(Settings):
    transport: Literal["auto", "cuda_ipc", "shared_memory"] = "auto"
    """auto: shared_memory on CPUs. On GPUs cuda_ipc; if a test before the run finds that processes cannot read each
    other's GPU memory, shared_memory with a warning. On GPUs, shared_memory is pinned host memory that each microbatch
    is copied through.
    """


class HiddenStatesHandoff(HandoffBase):
    """Final hidden states, and the head once; the student computes logits from them chunk by chunk."""

    type: Literal["hidden_states"] = "hidden_states"


class LogitsHandoff(HandoffBase):
    """Full-vocabulary logits: the reference, for any head."""

    type: Literal["logits"] = "logits"


Handoff = Annotated[HiddenStatesHandoff | LogitsHandoff, Field(discriminator="type")]
