"""Parallel layout of one model over its ranks."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from nemo_opd.config.base import Settings


class Parallelism(Settings):
    """Layout of a model. Data parallelism takes the remaining ranks: ranks / (cp · tp)."""

    tp: int = Field(1, ge=1)
    """Tensor parallel: ranks that share every layer's matrices and the vocabulary."""
    cp: int = Field(1, ge=1)
    """Context parallel: ranks that share the positions of every sequence. Above 1 it needs GPUs."""
    sequence_parallel: bool = False
    """Shard positions over the tensor-parallel ranks between attention and feed-forward blocks."""

    replicas: Annotated[int, Field(ge=1)] | Literal["auto"] = "auto"
    """Copies of the model, each sharded over separate ranks (HSDP): weights are gathered within a copy, and gradients
    are summed over copies once a step. 1: one copy over all ranks. auto: 1, except one copy per node on several GPU
    nodes, if that fits without `offload` by the memory estimate.
    """
    reshard_after_forward: Literal[True, False, "auto"] = "auto"
    """Free a layer's gathered weights after its forward pass (FSDP). false: a rank keeps all weights unsharded and
    gathers them once a step instead of twice a microbatch; a teacher's once. auto: false on GPUs if that fits without
    `offload` by the memory estimate.
    """

    @property
    def frees_gathered(self) -> bool:
        """Whether layers free their gathered weights; `auto` counts as true until it is resolved."""
        return self.reshard_after_forward is not False

    @model_validator(mode="after")
    def sequence_parallel_needs_tp(self) -> "Parallelism":
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel=true with tp=1: positions are sharded over the ranks of a tensor-parallel group, "
                "which has only one; set tp to 2 or more, or sequence_parallel=false"
            )
        return self
