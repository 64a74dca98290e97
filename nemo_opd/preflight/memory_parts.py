"""The memory estimate's types and inputs, and the formulas for optimizer state, caches and activations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from math import prod

import psutil
import torch

from nemo_opd.config import train
from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.logits.blocks import block_bytes
from nemo_opd.models.fused_layers import may_fuse
from nemo_opd.models.load import compute_dtype
from nemo_opd.preflight.model_info import LayerSize, ModelSize, Shape, cut_numel, shard_numel

USABLE = 0.95
"""Share of a memory that a plan may use: allocators fragment it, and libraries have buffers."""
SLACK = 1.25
"""Factor on the estimate, which is right within 20 %, before spending memory on optional things."""
FP32 = 4
"""Bytes per number."""
_MOMENTS = 2 * FP32
"""Bytes per parameter of AdamW's state; assumed for the user's optimizers, too."""
_SMALL, _BLOCK = 4096, 256
"""bitsandbytes: size below which a tensor's moments stay in fp32, and elements per quantisation scale."""


class Phase(StrEnum):
    LOADING = "loading"
    ANSWERS = "answers"
    """Teachers answer the evaluation's questions, before the first step."""
    ROLLOUT = "rollout"
    """The student samples in its own workers."""
    TEACHERS = "teachers"
    """The teachers' forward passes."""
    LOSS = "forward, loss"
    """The student's forward pass up to the gradient of its logits or last hidden states."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


LOADED: tuple[Phase, ...] = tuple(phase for phase in Phase if phase is not Phase.LOADING)
STUDENT_PHASES: tuple[Phase, ...] = (Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
STEP: tuple[Phase, ...] = (Phase.ROLLOUT, Phase.TEACHERS, *STUDENT_PHASES)


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose in one worker."""

    owner: str
    """`student` or a teacher's name."""
    name: str
    num_bytes: Mapping[Phase, int]
    """Bytes by phase; 0 in a missing phase."""
    on_host: bool = False
    """Whether it is in main memory even if the device is a GPU."""
    in_turn: bool = False
    """Whether a teacher has it only while it computes; teachers on the same device take turns."""

    def __str__(self) -> str:
        return f"{self.owner}: {self.name}"

    def at(self, phase: Phase) -> int:
        return self.num_bytes.get(phase, 0)


def constant_part(
    owner: str, name: str, num_bytes: int, *phases: Phase, on_host: bool = False, in_turn: bool = False
) -> Part:
    """Return a part of the same size in each of `phases`."""
    return Part(owner, name, dict.fromkeys(phases, num_bytes), on_host, in_turn)


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory of a rank: a GPU, or a share of a node's main memory."""

    name: str
    parts: tuple[Part, ...]
    capacity: int | None
    """Bytes available to a rank; None if unknown."""
    phases: tuple[Phase, ...] = tuple(Phase)
    """Phases that the run has."""

    def total(self, phase: Phase) -> int:
        return sum(part.at(phase) for part in self.parts)

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)

    @property
    def shortage(self) -> int:
        """Peak minus usable capacity in bytes; 0 if it fits or the capacity is unknown."""
        return 0 if self.capacity is None else max(0, self.peak - int(USABLE * self.capacity))


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimate for all memories of a rank."""

    memories: tuple[Memory, ...]
    """Devices first, then main memory."""
    block_bytes: int
    """Byte budget assumed for a block of the student's logits, and for a loss's temporaries."""
    caches_fit: bool = False
    """Whether a GPU has room for the PyTorch caches of all its processes at their peaks."""

    @property
    def shortest(self) -> Memory:
        """The memory with the largest shortage; ties go to the largest peak."""
        return max(self.memories, key=lambda memory: (memory.shortage, memory.peak))

    @property
    def fits(self) -> bool:
        return not self.shortest.shortage

    @property
    def fits_easily(self) -> bool:
        """Whether it still fits if the estimate is too low by the factor SLACK."""
        return all(
            memory.capacity is None or SLACK * memory.peak <= USABLE * memory.capacity for memory in self.memories
        )


@dataclass(frozen=True, slots=True)
class Machine:
    """Device and memories of a rank."""

    device: str
    device_bytes: int | None
    """Memory of one GPU; None on CPU or if unknown."""
    host_bytes: int | None
    """Main memory of a node; None if unknown."""
    ranks_per_node: int
    """GPUs in use on a node; on CPU, the student's ranks on it."""

    @staticmethod
    def of_this_node(device: str, ranks_per_node: int, *, is_remote: bool) -> Machine:
        """Return this machine. is_remote: the run is on other machines, assumed to have this one's GPUs, if any."""
        sees_gpu = device == "cuda" and torch.cuda.is_available()
        # The free memory would be more exact, but reading it opens a CUDA context in the driver.
        device_bytes = torch.cuda.get_device_properties(0).total_memory if sees_gpu else None
        return Machine(device, device_bytes, None if is_remote else psutil.virtual_memory().total, ranks_per_node)

    @property
    def host_share(self) -> int | None:
        return None if self.host_bytes is None else self.host_bytes // self.ranks_per_node


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Model with its layout, and the amounts that a rank holds of it."""

    size: ModelSize
    vocab_size: int
    """Number of ids of its tokenizer; losses and buffers ignore further rows of the head."""
    layout: Layout
    stretch: Fraction = Fraction(1)
    """Tokens of its longest sequence divided by `train.max_length`."""
    longest_question: int = 0
    """Most tokens of a benchmark's question with its answer; 0 without benchmarks."""

    @property
    def shard(self) -> int:
        """Number of parameters in a rank's FSDP2 shard, without adapters."""
        return shard_numel(self.size.shapes, self.layout)

    @property
    def trained(self) -> int:
        """Number of trained parameters in a rank's FSDP2 shard."""
        return shard_numel(self.size.trained_shapes, self.layout)

    def student_bytes(self, itemsize: int) -> int:
        """Return the bytes of the student's weights on a rank: fp32, or with adapters frozen weights and fp32 adapters.

        itemsize: bytes per element of frozen weights.
        """
        return itemsize * self.shard + FP32 * self.trained if self.size.adapters else FP32 * self.shard

    @property
    def whole(self) -> int:
        """Number of parameters on a tensor-parallel rank when all are gathered, with adapters."""
        return cut_numel((*self.size.shapes, *self.size.adapters), self.layout.tp)

    @property
    def rest(self) -> int:
        """Number of gathered parameters outside the layers, which FSDP2 gathers together."""
        return cut_numel(self.size.rest, self.layout.tp)

    def is_sharded(self, model: Student | Teacher, itemsize: int) -> bool:
        """Return whether FSDP2 manages the parameters; on one rank, only if it casts the student's from fp32."""
        return self.layout.size > 1 or (isinstance(model, Student) and itemsize < FP32)

    def gathered(self, model: Student | Teacher, itemsize: int) -> tuple[int, int]:
        """Return the bytes of weights that stay gathered, and of the current layer and the prefetched one."""
        if not self.is_sharded(model, itemsize):
            return 0, 0
        if not model.parallelism.frees_gathered:
            return itemsize * self.whole, 0
        layers = max(cut_numel((*layer.shapes, *layer.adapters), self.layout.tp) for layer in self.size.layers)
        return itemsize * self.rest, 2 * itemsize * layers

    def columns(self, vocab_size: int) -> int:
        """Return the number of columns of the vocabulary on a tensor-parallel rank."""
        return -(-vocab_size // self.layout.tp)

    def work(self, model: Student | Teacher, rows: int, length: int, device: str) -> Work:
        """Return a rank's work on `rows` sequences of `length` positions, divided over context-parallel ranks."""
        dtype, layout = compute_dtype(model.dtype, device), self.layout
        return Work(
            rows * -(-length // layout.cp),
            length,
            dtype.itemsize,
            layout.tp,
            layout.tp if model.parallelism.sequence_parallel else 1,
            may_fuse(model.fused_layers, dtype, device) and not model.compile,
        )


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """Inputs of the estimate: models and machine of a run."""

    student: ModelSetup
    teachers: tuple[ModelSetup, ...]
    """One per active teacher."""
    machine: Machine
    arriving: int = 0
    """Bytes of teacher output from other nodes that a student rank keeps."""
    through_host: bool = False
    """Whether teacher output is handed over in main memory and copied to the student's device."""
    num_learned: int = 0
    """Elements of all learned projections, replicated on every student rank."""
    small_blocks: bool = False
    """Whether blocks of logits are as small as on a GPU with little memory."""

    def with_layouts(self, layouts: Mapping[int, Layout], config: RunConfig) -> MemoryInputs:
        """Return the situation with other layouts, keyed by 0 for the student and 1 + i for teacher i.

        A teacher with the student's weights has the student's layout.
        """
        student = replace(self.student, layout=layouts.get(0, self.student.layout))
        teachers = (
            replace(setup, layout=student.layout if settings.is_student else layouts.get(i, setup.layout))
            for i, (setup, settings) in enumerate(zip(self.teachers, config.active_teachers, strict=True), 1)
        )
        return replace(self, student=student, teachers=tuple(teachers))

    @property
    def device(self) -> str:
        return self.machine.device

    @property
    def block_bytes(self) -> int:
        """Byte budget for a block of the student's logits, and for a loss's temporaries."""
        return block_bytes(self.device, None if self.small_blocks else self.machine.device_bytes)


@dataclass(frozen=True, slots=True)
class Work:
    """Forward pass of a microbatch on one rank."""

    tokens: int
    """Positions on this rank."""
    length: int
    """Positions of a sequence, over all context-parallel ranks."""
    itemsize: int
    """Bytes per element of the compute dtype."""
    tp: int = 1
    stream_share: int = 1
    """Number of ranks over which sequence parallelism cuts the hidden states between layers."""
    is_fused: bool = False
    """Whether known layers are computed by the kernels of `fused_layers`."""


def state_bytes(settings: train.Optimizer, size: ModelSize, layout: Layout) -> int:
    """Return the bytes of the optimizer's state on rank 0, without step counters."""
    shapes = size.trained_shapes
    if isinstance(settings, train.Adafactor):
        return sum(_mean_squares(shape) for shape in shapes)
    if isinstance(settings, train.AdamW8bit):
        return sum(_quantised(prod(shape)) for shape in shapes)
    moments = _MOMENTS * shard_numel(shapes, layout)
    if not isinstance(settings, train.Muon):
        return moments
    with_muon = tuple(shape for layer in size.layers for shape in layer.trained_shapes if len(shape) == 2)
    return moments - FP32 * shard_numel(with_muon, layout)  # Muon has one moment, the other parameters two


def _mean_squares(shape: Shape) -> int:
    """Return the bytes of Adafactor's state: one number per row and column of the last two dimensions."""
    if len(shape) < 2:
        return FP32 * prod(shape)
    *stack, rows, columns = shape
    return FP32 * prod(stack) * (rows + columns)


def _quantised(numel: int) -> int:
    return _MOMENTS * numel if numel < _SMALL else 2 * numel + _MOMENTS * -(-numel // _BLOCK)


def cache_bytes(size: ModelSize, tp: int, itemsize: int, rows: int, length: int, *, is_read: bool = True) -> int:
    """Return the bytes of all layers' keys and values on a tensor-parallel rank; exact for plain attention.

    is_read: the prompt has been read; until then sliding-window layers keep all of it. Layers that keep less (linear
    attention, compressed keys) count like plain attention.
    """
    numel = sum(
        2 * layer.key_width * (min(length, layer.window or length) if is_read else length) for layer in size.layers
    )
    return rows * numel * itemsize // tp


def layer_bytes(layer: LayerSize, work: Work) -> int:
    """Return the bytes that one layer saves for backward on one rank.

    With c bytes per element, hidden size D, W active weights per token, N elements through norms, E experts per token,
    S positions and H heads with materialised scores, a token saves

        8 · N / sp  +  2 · c · D · (1 + E)  +  (5/4 · c · W / D + 8 · S · H) / tp

    A norm saves input and output in fp32; the matrices after norms, and each expert, read D elements and write D. W / D
    elements enter or leave matrices inside the layer, and the MLP's activation function outputs about a quarter as
    many. With fused kernels a norm saves only its input, in the compute dtype, and the activation function nothing: c
    and 1 replace 8 and 5/4. Only eager attention materialises scores. Adapter dropout saves a copy of its input and the
    mask.
    """
    c = work.itemsize
    of_norm, quarters = (c, 4) if work.is_fused and layer.is_known else (2 * FP32, 5)
    stream = of_norm * layer.norms // work.stream_share + 2 * c * layer.hidden_size * (1 + layer.num_experts)
    inner = quarters * c * layer.active_weights // (4 * layer.hidden_size) + 2 * FP32 * work.length * layer.score_heads
    return work.tokens * (stream + inner // work.tp + (c + 1) * layer.dropped)


def saved_activations(size: ModelSize, work: Work, *, checkpointing: bool) -> int:
    """Return the bytes that the backbone saves for backward on one rank; with checkpointing, the layers' inputs."""
    inputs = work.tokens * size.hidden_size * work.itemsize // work.stream_share
    final = work.tokens * size.hidden_size * (2 * FP32 + work.itemsize)
    return final + sum(inputs if checkpointing else layer_bytes(layer, work) for layer in size.layers)


def temporaries(size: ModelSize, work: Work) -> int:
    """Return the bytes of one layer's temporaries, forward or backward: about 3/4 of its saved activations."""
    return 3 * max(layer_bytes(layer, work) for layer in size.layers) // 4
