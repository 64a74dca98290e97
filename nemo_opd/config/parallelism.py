"""Parallel layout of one model over its ranks."""

from pydantic import Field, model_validator

from nemo_opd.config.base import Settings


class Parallelism(Settings):
    """Data parallel is what is left: ranks / (cp · tp)."""

    tp: int = Field(1, ge=1)
    """Tensor parallel: ranks that share every layer's matrices and the vocabulary."""
    cp: int = Field(1, ge=1)
    """Context parallel: ranks that share the positions of every sequence. Needs GPUs where above 1."""
    sequence_parallel: bool = False
    """Whether each rank holds only a part of the positions between attention and feed-forward blocks; with tp."""

    reshard_after_forward: bool = True
    """Free the gathered weights of a layer after its forward pass (FSDP). false: a rank keeps all weights whole, and
    gathers them once a step instead of twice a microbatch; those of a teacher once.
    """

    @model_validator(mode="after")
    def sequence_parallel_needs_tp(self) -> "Parallelism":
        if self.sequence_parallel and self.tp == 1:
            raise ValueError(
                "sequence_parallel=true with tp=1: positions are shared by the ranks of a tensor-parallel group, and "
                "there is only one; set tp to 2 or more, or sequence_parallel=false"
            )
        return self
