"""The parts of one worker's process, and what PyTorch's allocator makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import prod

from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.memory.estimate import STUDENT_PHASES, Part, Phase, during
from nemo_opd.training.memory.size import ModelSize, Shape, adapter_shapes, cut_numel

OTHERS_PHASES = (Phase.ROLLOUT, *STUDENT_PHASES)
"""In which no teacher works."""
CONTEXT_BYTES = 512 * 2**20
"""What CUDA and its libraries take on a GPU for each process."""


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """A model and how its ranks are arranged."""

    size: ModelSize
    vocab_size: int
    """Ids of its tokenizer; losses and buffers leave out what the head has beyond."""
    layout: Layout
    sequence_parallel: bool = False
    stretch: Fraction | None = None
    """Tokens of its longest sequence for each of `train.max_length`, as an estimate; None: not known."""

    @property
    def fsdp_ranks(self) -> int:
        return self.layout.dp * self.layout.cp

    @property
    def rest(self) -> int:
        """Parameters outside the layers, gathered together."""
        return cut_numel(self.size.rest, self.layout.tp)

    @property
    def whole(self) -> int:
        """All parameters, gathered."""
        return cut_numel((*self.size.shapes, *adapter_shapes(self.size.adapters)), self.layout.tp)

    @property
    def layer(self) -> int:
        """Parameters of the largest layer, gathered."""
        widest = self.size.widest_layer
        return cut_numel((*widest.shapes, *adapter_shapes(widest.adapters)), self.layout.tp)

    @property
    def trained_layer(self) -> int:
        """Those of them that get a gradient."""
        return cut_numel(self.size.widest_layer.trained_shapes, self.layout.tp)

    @property
    def trained_rest(self) -> int:
        return 0 if self.size.adapters else self.rest

    @property
    def trained_head(self) -> int:
        return 0 if self.size.adapters else self.head

    @property
    def gathered_layers(self) -> int:
        """Layers gathered at a time: with other ranks the next is on its way while one is computed."""
        return self.layer * (1 if self.fsdp_ranks == 1 else 2)

    @property
    def head(self) -> int:
        """Parameters of the head's rows on a tensor-parallel rank."""
        return -(-self.size.vocab_size // self.layout.tp) * self.size.hidden_size


@dataclass(frozen=True, slots=True)
class Process:
    device: tuple[Part, ...]
    host: tuple[Part, ...]
    works_in: tuple[Phase, ...]
    is_offloaded: bool
    """Its model leaves the device when it has worked, and with it what the allocator keeps."""


def after_reading(config: RunConfig) -> tuple[Phase, ...]:
    """In which teachers read no batch, and there is what the first one left: that of validation, where there is any,
    comes before the questions.
    """
    return (Phase.ANSWERS, *OTHERS_PHASES) if config.data.validation.given else OTHERS_PHASES


def largest(shapes: Sequence[Shape]) -> int:
    return max(map(prod, shapes))


def with_cache(process: Process, *, gives_back: bool) -> tuple[Part, ...]:
    """The parts on a GPU: with the context, and with what the allocator keeps when the process has worked.

    Unless it gives that back, other processes on the device cannot have it.
    """
    totals = {phase: sum(part.at(phase) for part in process.device) for phase in Phase}
    owner = process.device[0].owner
    context = Part(owner, "CUDA", during(CONTEXT_BYTES, *Phase))
    if gives_back:
        return (*process.device, context)
    most = max(totals[phase] for phase in process.works_in)
    rests = [phase for phase in Phase if phase not in process.works_in and phase is not Phase.LOADING]
    kept: dict[Phase, int] = {phase: most - totals[phase] for phase in rests}
    return (*process.device, Part(owner, "free, but kept by PyTorch", kept), context)
