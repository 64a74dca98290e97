"""Estimate of each rank's memory, by part and phase: the formulas of docs/scaling.md#what-a-rank-holds.

Weights, gradients, optimizer state, handoff buffers and caches are exact; activations are estimated.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction
from itertools import chain
from math import ceil, prod

import psutil
import torch

from nemo_opd.config.model import Student
from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.config.train import Adafactor, AdamW8bit, Muon, Optimizer
from nemo_opd.distributed.layout import Layout
from nemo_opd.logits.blocks import block_bytes, least_rows
from nemo_opd.losses.cross_entropy import LIVE_COPIES
from nemo_opd.models.fused_layers import may_fuse
from nemo_opd.models.load import compute_dtype
from nemo_opd.preflight.model_info import LayerSize, ModelSize, cut_numel, shard_numel
from nemo_opd.preflight.teachers import output_columns
from nemo_opd.rollout.engine_interface import SamplingBatch, student_batch, teacher_batch
from nemo_opd.rollout.server.server_process import COMMON_SHARE

USABLE = 0.95
"""Share of a memory that a plan may use: allocators fragment it, and libraries have buffers."""
SLACK = 1.25
"""Factor on the estimate, which is right within 20 %, before spending memory on optional things."""
FP32 = 4
"""Bytes per number."""
CONTEXT_BYTES = 512 * 2**20
"""GPU memory of CUDA and its libraries per process."""
_ASLEEP_BYTES = 2 * 2**30
"""GPU memory of a sleeping server: CUDA, its libraries, captured graphs. Assumed, not measured."""
_COPIES = 12
"""fp32 copies of a chunk's logits alive at once in the most expensive distillation loss."""
_BYTES_PER_LOGIT = 36
"""Bytes per logit for sampling a token: fp32 logits, warped logits, probabilities, fp64 cumulative sums, masks."""
STUDENT, SERVER = "student", "rollout server"
SAMPLING = ("parameters, gathered whole", "key-value cache", "activations and logits of sampling")
"""Names of the parts of sampling."""


class Phase(StrEnum):
    """Phases of a run. Teachers answer the evaluation's questions before the first step. `forward, loss` ends with the
    gradient of the logits or last hidden states; `backward` includes the optimizer's step.
    """

    LOADING = "loading"
    ANSWERS = "answers"
    ROLLOUT = "rollout"
    TEACHERS = "teachers"
    LOSS = "forward, loss"
    BACKWARD = "backward"


TRAINING = (Phase.LOSS, Phase.BACKWARD)
_STEP = (Phase.ROLLOUT, Phase.TEACHERS, *TRAINING)
_LOADED = (Phase.ANSWERS, *_STEP)
_TURNS = (Phase.ANSWERS, Phase.TEACHERS)


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose in one worker."""

    owner: str
    """`student`, a teacher's name or `rollout server`."""
    name: str
    num_bytes: Mapping[Phase, int]
    on_host: bool = False
    """Whether it is in main memory even if the device is a GPU."""
    in_turn: bool = False
    """Whether in the phases of teachers it exists only while its owner computes; those of a device take turns."""

    def __str__(self) -> str:
        return f"{self.owner}: {self.name}"

    def at(self, phase: Phase) -> int:
        return self.num_bytes.get(phase, 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory of a rank: a GPU, or a share of a node's main memory."""

    name: str
    parts: tuple[Part, ...]
    capacity: int | None
    """Bytes available to a rank; None if unknown."""

    def total(self, phase: Phase) -> int:
        return sum(part.at(phase) for part in self.parts)

    @property
    def peak_phase(self) -> Phase:
        return max(Phase, key=lambda phase: (self.total(phase), phase not in (Phase.ANSWERS, Phase.ROLLOUT)))

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

    def fits(self, factor: float = 1.0) -> bool:
        """Return whether `factor` times each peak fits its memory, as far as that is known."""
        return all(m.capacity is None or factor * m.peak <= int(USABLE * m.capacity) for m in self.memories)


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


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Model with its layout."""

    size: ModelSize
    vocab_size: int
    """Number of ids of its tokenizer; losses and buffers ignore further rows of the head."""
    layout: Layout
    stretch: Fraction = Fraction(1)
    """Tokens of its longest sequence divided by `train.max_length`."""
    longest_question: int = 0
    """Most tokens of a benchmark's question with its answer; 0 without benchmarks."""


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

    @property
    def block_bytes(self) -> int:
        """Byte budget for a block of the student's logits, and for a loss's temporaries."""
        return block_bytes(self.machine.device, None if self.small_blocks else self.machine.device_bytes)


class Rank:
    """One rank of a model: the quantities of the formulas, in bytes unless stated otherwise."""

    def __init__(self, model: Student | Teacher, setup: ModelSetup, device: str) -> None:
        size, layout, dtype = setup.size, setup.layout, compute_dtype(model.dtype, device)
        self.size, self.tp, self.cp, self.c = size, layout.tp, layout.cp, dtype.itemsize
        is_student = isinstance(model, Student)
        self.trained = FP32 * shard_numel(size.trained_shapes, layout)
        frozen = 0 if is_student and not size.adapters else self.c * shard_numel(size.shapes, layout)
        self.weights = frozen + self.trained * is_student
        self.optimizer = state_bytes(model.optimizer, size, layout) if isinstance(model, Student) else 0
        # On one rank, FSDP2 manages only a student's parameters that it casts from fp32.
        self.is_sharded = layout.size > 1 or (is_student and self.c < FP32)
        self.whole = self.c * self.is_sharded * cut_numel((*size.shapes, *size.adapters), self.tp)
        layers = (cut_numel((*layer.shapes, *layer.adapters), self.tp) for layer in size.layers)
        is_kept = not model.parallelism.frees_gathered
        self.gathered = self.whole if is_kept else self.c * self.is_sharded * cut_numel(size.rest, self.tp)
        """Weights that stay gathered: all, or without those of the layers."""
        self.layers = 0 if is_kept else 2 * self.c * self.is_sharded * max(layers, default=0)
        """Gathered weights of the current layer and the prefetched one."""
        self.sp = self.tp if model.parallelism.sequence_parallel else 1
        self.is_fused = may_fuse(model.fused_layers, dtype, device) and not model.compile
        """Whether known layers are computed by the kernels of `fused_layers`."""

    def tokens(self, rows: int, length: int) -> int:
        """Return the positions on this rank of `rows` sequences, which context-parallel ranks share."""
        return rows * -(-length // self.cp)

    def columns(self, vocab_size: int) -> int:
        """Return the columns of the vocabulary on this rank."""
        return -(-vocab_size // self.tp)

    def layer_bytes(self, layer: LayerSize, tokens: int, length: int, sp: int = 1) -> int:
        """Return the bytes that one layer saves for backward, by the formula of docs/scaling.md#activations.

        tokens: positions on this rank, of sequences of `length` (P in the formula). sp: ranks over which sequence
        parallelism cuts the elements through norms. The layer's `norms`, `hidden_size`, `num_experts`, `active_weights`
        and `score_heads` are N, D, K, A and H.
        """
        c, hidden = self.c, layer.hidden_size
        of_norm, quarters = (c, 4) if self.is_fused and layer.is_known else (2 * FP32, 5)
        stream = of_norm * layer.norms // sp + 2 * c * hidden * (1 + layer.num_experts)
        inner = quarters * c * layer.active_weights // (4 * hidden) + 2 * FP32 * length * layer.score_heads
        return tokens * (stream + inner // self.tp + (c + 1) * layer.dropped)

    def saved(self, tokens: int, length: int, *, checkpointing: bool) -> int:
        """Return the bytes that the backbone saves for backward; with checkpointing, the layers' inputs."""
        inputs = tokens * self.size.hidden_size * self.c // self.sp
        final = tokens * self.size.hidden_size * (2 * FP32 + self.c)
        layers = self.size.layers
        return final + sum(
            inputs if checkpointing else self.layer_bytes(layer, tokens, length, self.sp) for layer in layers
        )

    def working(self, tokens: int, length: int, sp: int = 1) -> int:
        """Return the bytes of one layer's temporaries, forward or backward: about 3/4 of its saved activations."""
        return 3 * max(self.layer_bytes(layer, tokens, length, sp) for layer in self.size.layers) // 4

    def cache(self, rows: int, length: int, *, is_read: bool = True) -> int:
        """Return the bytes of all layers' keys and values; exact for plain attention.

        is_read: the prompt has been read; until then sliding-window layers keep all of it. Linear attention and
        compressed keys, which keep less, count like plain attention.
        """
        widths = ((layer.key_width, layer.window if is_read else None) for layer in self.size.layers)
        return rows * sum(2 * width * min(length, window or length) for width, window in widths) * self.c // self.tp


def state_bytes(settings: Optimizer, size: ModelSize, layout: Layout) -> int:
    """Return the bytes of the optimizer's state on rank 0, without step counters.

    Two fp32 numbers per trained parameter, also for the user's optimizers. Muon has one for each matrix of a layer,
    Adafactor one per row and column, and 8-bit AdamW two bytes and two fp32 scales for each 256, except in tensors of
    fewer than 4,096 elements.
    """
    shapes = size.trained_shapes
    if isinstance(settings, Adafactor):
        return FP32 * sum(prod(s) if len(s) < 2 else prod(s[:-2]) * (s[-2] + s[-1]) for s in shapes)
    if isinstance(settings, AdamW8bit):
        return sum(2 * FP32 * n if n < 4096 else 2 * n + 2 * FP32 * -(-n // 256) for n in map(prod, shapes))
    matrices = tuple(shape for layer in size.layers for shape in layer.trained_shapes if len(shape) == 2)
    with_muon = matrices if isinstance(settings, Muon) else ()
    return FP32 * (2 * shard_numel(shapes, layout) - shard_numel(with_muon, layout))


def estimate(config: RunConfig, inputs: MemoryInputs) -> MemoryEstimate:
    """Return the bytes on one rank by part and phase, with the settings as they are: `offload: auto` counts as false.

    Processes that share a GPU empty PyTorch's cache for each other, so each phase counts only live memory.
    """
    machine, is_cpu = inputs.machine, inputs.machine.device == "cpu"
    parts = [*_student_parts(config, inputs), *_server_parts(config, machine)]
    owners = {STUDENT: [STUDENT, SERVER]}  # by process
    for teacher, setup in zip(config.active_teachers, inputs.teachers, strict=True):
        parts += _teacher_parts(config, inputs, teacher, setup)
        owners.setdefault(STUDENT if teacher.is_student else teacher.name, []).append(teacher.name)
    parts += [Part(process, "CUDA", dict.fromkeys(Phase, CONTEXT_BYTES)) for process in owners if not is_cpu]
    live = {
        f"each GPU of {'the student' if process == STUDENT else process}": [
            part for part in parts if part.owner in names and (is_cpu or not part.on_host)
        ]
        for process, names in owners.items()
    }
    # PyTorch's cache grows to the memory of each process in its largest phase.
    cached = sum(max(sum(part.at(phase) for part in process) for phase in Phase) for process in live.values())
    caches_fit = machine.device_bytes is not None and SLACK * cached < USABLE * machine.device_bytes
    if config.cluster.placement == "colocated":
        live = {"each GPU": list(chain(*live.values()))}
    devices = [Memory(name, _take_turns(process), machine.device_bytes) for name, process in live.items()]
    on_host = chain(*(memory.parts for memory in devices)) if is_cpu else (part for part in parts if part.on_host)
    share = None if machine.host_bytes is None else machine.host_bytes // machine.ranks_per_node
    host = Memory(f"main memory for each {'rank' if is_cpu else 'GPU'}", tuple(on_host), share)
    return MemoryEstimate((host,) if is_cpu else (*devices, host), inputs.block_bytes, caches_fit)


def _take_turns(parts: Sequence[Part]) -> tuple[Part, ...]:
    """Leave out the `in_turn` parts of all owners except the one that needs most, in each phase of teachers."""
    for phase in _TURNS:
        work = Counter(dict.fromkeys((part.owner for part in parts), 0))
        for part in parts:
            work[part.owner] += part.at(phase) * part.in_turn
        busiest = max(work, key=work.__getitem__)
        parts = [
            replace(part, num_bytes={**part.num_bytes, phase: 0}) if part.in_turn and part.owner != busiest else part
            for part in parts
        ]
    return tuple(parts)


def sharing_server(config: RunConfig, machine: Machine) -> ServerRollout | None:
    """Return the rollout server on the training GPUs, or None if there is none or the GPUs' memory is unknown."""
    server = config.rollout if isinstance(config.rollout, ServerRollout) and config.rollout.shares_devices else None
    return None if machine.device_bytes is None else server


def _server_parts(config: RunConfig, machine: Machine) -> Iterator[Part]:
    """Yield the server's memory: `rollout.memory_share` or the least share; little while it sleeps."""
    if (server := sharing_server(config, machine)) is not None:
        awake = int((server.memory_share or COMMON_SHARE) * (machine.device_bytes or 0))
        asleep = _ASLEEP_BYTES if server.sleeps_on_gpus else awake
        yield Part(SERVER, "its share", {**dict.fromkeys(_LOADED, asleep), Phase.ROLLOUT: awake})


def _student_parts(config: RunConfig, inputs: MemoryInputs) -> Iterator[Part]:
    """Yield the parts of the student, without teachers that have its weights.

    In the backward pass activations go as gradients come; from the second microbatch on, earlier gradients are there.
    FSDP2 reduces a layer's gradients in fp32, from a copy of the unsharded ones, and at the end the embedding's and the
    head's; if it reduces once per step, all unsharded ones accumulate until then. Comparing the gradients of KD and CE
    keeps one more set.
    """
    train, student, setup, device = config.train, config.student, inputs.student, inputs.machine.device
    rank, size, layout = Rank(student, setup, device), setup.size, setup.layout
    optimizer, leaves = rank.optimizer, student.offload is True and device == "cuda"
    yield Part(STUDENT, "parameters", {phase: rank.weights for phase in Phase if not (leaves and phase in _TURNS)})
    # Before the first step the optimizer has no state.
    yield Part(STUDENT, "optimizer", dict.fromkeys(TRAINING if leaves else _STEP, optimizer))
    yield Part(STUDENT, "parameters, optimizer", dict.fromkeys(_LOADED, (rank.weights + optimizer) * leaves), True)
    averages = sum(teacher.weights == "ema" for teacher in config.active_teachers)
    saved = (1 + averages) * rank.trained + optimizer if train.async_save else 0
    yield Part(STUDENT, "copy of the checkpoint being written", dict.fromkeys(_STEP, saved), on_host=True)
    yield Part(STUDENT, "gathered parameters", dict.fromkeys(TRAINING, rank.gathered + rank.layers))

    has_several = train.global_batch_size > layout.dp * max(1, train.tokens_at_a_time // train.max_length)
    reduces_once = rank.is_sharded and has_several and student.sync_each_micro_batch is False
    new = 0 if has_several and not reduces_once else rank.trained
    gradients = rank.trained * (1 + (config.logging.gradients_every is not None))
    yield Part(STUDENT, "gradients", {Phase.LOSS: gradients - new, Phase.BACKWARD: gradients})
    unsharded = FP32 * cut_numel(size.trained_shapes, rank.tp) * reduces_once
    yield Part(STUDENT, "unsharded gradients", dict.fromkeys(TRAINING, unsharded))
    rows, length = train.longest_at_a_time(layout.dp), train.max_length
    tokens, checkpointing = rank.tokens(rows, length), student.activation_checkpointing
    activations = rank.saved(tokens, length, checkpointing=checkpointing)
    recomputed = max(rank.layer_bytes(layer, tokens, length, rank.sp) for layer in size.layers) * checkpointing
    copies = (rank.c + FP32) * rank.is_sharded
    layer = copies * max(cut_numel(layer.trained_shapes, rank.tp) for layer in size.layers)
    working = layer + recomputed + rank.working(tokens, length, rank.sp) + max(0, activations - new)
    at_end = 0 if size.adapters else copies * cut_numel(size.rest, rank.tp)
    yield Part(STUDENT, "activations", {Phase.LOSS: activations, Phase.BACKWARD: max(working, at_end)})

    yield from _loss_parts(config, inputs, rank, rows)
    # log R₀ in fp64, and Δ with its moments and gradient; in the loss also log R, its gradient and an fp64 temporary.
    learned = inputs.num_learned
    yield Part(STUDENT, "learned projections", {**dict.fromkeys(Phase, 24 * learned), Phase.LOSS: 48 * learned})
    yield Part(STUDENT, "output of teachers on other nodes", dict.fromkeys(_LOADED, inputs.arriving))
    yield from _sampling_parts(STUDENT, Phase.ROLLOUT, rank, student_batch(config, layout.dp), setup.longest_question)


def _loss_parts(config: RunConfig, inputs: MemoryInputs, rank: Rank, rows: int) -> Iterator[Part]:
    """Yield the parts of the loss.

    If logits are handed over: whole logits and their gradient; a soft cap also keeps the tanh. Otherwise: the
    gradients of hidden states, which context-parallel ranks gather, and of the head, which is summed in fp32 next to a
    copy in a lower compute dtype; and blocks of equally many rows of all heads, which share the block's budget.
    """
    size, budget, length = inputs.student.size, inputs.block_bytes, config.train.max_length
    columns, vocab_sizes = rank.columns(size.vocab_size), [m.vocab_size for m in (inputs.student, *inputs.teachers)]
    chunk = min(budget, (_COPIES if inputs.teachers else LIVE_COPIES) * rows * length * FP32 * max(vocab_sizes))
    if config.handoff.type == "logits":
        logits = rank.tokens(rows, length) * columns * rank.c * (4 if size.has_soft_cap else 2)
        yield Part(STUDENT, "logits and their gradients", dict.fromkeys(TRAINING, logits))
        yield Part(STUDENT, "temporaries of a loss", {Phase.LOSS: chunk})
        return
    hidden = rows * length * size.hidden_size * rank.c * min(2, rank.cp)
    head = 0 if size.adapters else columns * size.hidden_size
    summed = (FP32 + rank.c * (rank.c < FP32)) * head
    gradients = {Phase.LOSS: hidden + summed, Phase.BACKWARD: hidden + rank.c * head}
    yield Part(STUDENT, "gradients of hidden states and head", gradients)
    block_rows = max(budget // (FP32 * sum(vocab_sizes)), least_rows(inputs.machine.device))
    blocks = FP32 * min(block_rows, rows * length) * (sum(vocab_sizes) + vocab_sizes[0])
    yield Part(STUDENT, "blocks of logits, temporaries of a loss", {Phase.LOSS: blocks + chunk})


def _teacher_parts(config: RunConfig, inputs: MemoryInputs, teacher: Teacher, setup: ModelSetup) -> Iterator[Part]:
    """Yield the parts of a teacher's rank, and the student's copies of its output.

    Its output is in buffers for all batches in flight, with all positions even under cp. If the student's device reads
    them directly, it copies only sequences that are spread over several teacher ranks. Main memory keeps a copy of an
    offloaded teacher; with `layers`, the device has the parameters outside the layers, the current layer and the next.
    A teacher with the student's weights adds their average, which is updated after each step, and the student's weights
    only if they return to the device for it. A soft cap makes two more tensors of logits.
    """
    name, train, size, device = teacher.name, config.train, setup.size, inputs.machine.device
    model, layout, dp = config.student if teacher.is_student else teacher, setup.layout, inputs.student.layout.dp
    rank, width = Rank(model, setup, device), ceil(setup.stretch * train.max_length)
    rows = -(-train.global_batch_size // layout.dp)
    output_width, itemsize = output_columns(config, teacher, size, device)
    form = "hidden states" if teacher.is_computed or itemsize > 1 else "likeliest tokens"
    form = "logits" if output_width is None else form
    is_logits = form == "logits"
    row, columns = itemsize * (output_width or setup.vocab_size), rank.columns(setup.vocab_size)
    head = row * (form == "hidden states")
    batches = 1 if teacher.is_student else 1 + config.batches_ahead
    handed_over = batches * rows * width * (itemsize * columns if is_logits else row)
    copies = inputs.through_host or dp % layout.dp
    copied = row * train.longest_at_a_time(dp) * width * bool(copies) + head * setup.vocab_size * inputs.through_host
    buffers = {f"{form} handed over": handed_over, "head handed over": head * columns}
    for part, num_bytes in buffers.items():
        yield Part(name, part, dict.fromkeys(_LOADED, num_bytes), inputs.through_host)
    yield Part(STUDENT, f"output of {name}, copied", dict.fromkeys(_LOADED, copied))
    if not teacher.is_computed:
        yield Part(name, "head", dict.fromkeys(Phase, head * columns))
        return

    leaves = teacher.offload in (True, "layers") and device == "cuda"
    phases: tuple[Phase, ...] = (Phase.LOADING, *_TURNS) if leaves else tuple(Phase)
    label, shard = "parameters", rank.weights
    if teacher.is_student:
        label, shard, phases = "average", rank.trained * (teacher.weights == "ema"), (*phases, Phase.BACKWARD)
        reloaded = rank.weights * (model.offload is True and device == "cuda")
        yield Part(name, "the student's parameters", dict.fromkeys(_TURNS, reloaded), in_turn=True)
    on_device = shard
    if leaves and teacher.offload == "layers":
        largest = sorted(shard_numel(layer.shapes, layout) for layer in size.layers)[-2:]
        on_device = rank.c * (shard_numel(size.rest, layout) + sum(largest))
    yield Part(name, label, dict.fromkeys(phases, on_device), in_turn=leaves)
    if leaves:
        yield Part(name, label, dict.fromkeys(_LOADED, shard), on_host=True)
    in_turn = leaves or teacher.is_student
    gathered = dict.fromkeys([Phase.TEACHERS] if in_turn else _STEP, rank.gathered)
    yield Part(name, "gathered parameters", gathered, in_turn=in_turn)
    yield Part(name, "gathered layers", {Phase.TEACHERS: rank.layers}, in_turn=True)
    at_once = -(-(teacher.micro_batch_tokens or 0) // width) or train.longest_at_a_time(layout.dp)
    tokens = rank.tokens(min(rows, at_once), width)
    logits = is_logits * rank.columns(size.vocab_size) * (3 if size.has_soft_cap else 1)
    activations = max(rank.working(tokens, width, rank.sp), tokens * (size.hidden_size + logits) * rank.c)
    yield Part(name, "activations", {Phase.TEACHERS: activations}, in_turn=True)
    yield from _sampling_parts(name, Phase.ANSWERS, rank, teacher_batch(config, teacher), setup.longest_question)


def _sampling_parts(
    owner: str, phase: Phase, rank: Rank, batch: SamplingBatch | None, longest_question: int
) -> Iterator[Part]:
    """Yield the parts of transformers' `generate` for this batch or a benchmark's longest question.

    The larger of two moments counts: reading the prompts, or sampling the last token, when a layer's keys are copied as
    the cache grows. Ranks of a context-parallel group sample whole sequences.
    """
    moments, question = [(0, 0, 0)], SamplingBatch(1, longest_question - 1, 1) if longest_question else None
    for sampled in filter(None, (batch, question)):
        rows, prompt = sampled.rows, sampled.prompt
        end = rank.cache(rows, prompt + sampled.new - 1)
        copied, logits = end // (2 * len(rank.size.layers)), rows * rank.size.vocab_size * _BYTES_PER_LOGIT
        moments.append((rank.whole, rank.cache(rows, prompt, is_read=False), rank.working(rows * prompt, prompt)))
        moments.append((rank.whole, end, copied + logits))
    for name, num_bytes in zip(SAMPLING, max(moments, key=sum), strict=True):
        yield Part(owner, name, {phase: num_bytes}, in_turn=True)
