"""What a microbatch asks of a GPU, counted on one that is none: the workers' own code, on shapes without values.

A model's layers are equal, so that models of one and of two layers tell what those of all layers would ask for.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from roofline_models import MODELS, Recipe, Shape
from roofline_work import Counts, Kind
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedModel

from nemo_opd.aggregation import build_objective
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.buffer import Handle, Receiver, Sender
from nemo_opd.handoff.outputs import HiddenStatesWriter, Window, windows
from nemo_opd.handoff.slices import ONE_READER, LayoutPair
from nemo_opd.logits.blocks import LEAST_BLOCK_BYTES, block_bytes
from nemo_opd.models import packed_attention
from nemo_opd.models.causal_model import HiddenStateModel
from nemo_opd.models.fused_layers import replace_parts
from nemo_opd.preflight.flops import Utilization
from nemo_opd.preflight.model_info import model_size
from nemo_opd.types import Batch, ChunkRows, SampledRows, TeacherRows, TokenRows
from nemo_opd.workers.frozen import TeacherModel
from nemo_opd.workers.offload import DeviceOffload
from nemo_opd.workers.out_of_memory import FORWARD, FrozenTasks
from nemo_opd.workers.step import StudentStep
from nemo_opd.workers.student_worker import StudentWorker
from nemo_opd.workers.teacher_worker import TeacherWorker
from tests.losses.real_sizes import projection
from tests.pretend_gpu import DEVICE, OnDevice, Work, counted
from tests.pretend_kernels import Kernel

_ONE_PLACE = (Place(0, 0),)


def micro_batch(
    recipe: Recipe, config: RunConfig, memory: float, *, tp: int = 1, fused_layers: bool = True
) -> dict[str, Counts]:
    """Count the parts of a microbatch, whole models: `teacher <name>`, `handoff`, `forward`, `loss`, `backward`.

    memory: of the GPU, from which blocks of logits get their budget. tp: ranks that share the teachers.
    """
    one, two = (_counted(recipe, config, layers, memory, tp, fused_layers=fused_layers) for layers in (1, 2))
    layers = {f"teacher {name}": MODELS[name].layers for name in recipe.teachers}
    layers |= dict.fromkeys(("forward", "backward"), MODELS[recipe.student].layers)
    found = {}
    for part, counts in one.items():
        each = two[part].plus(counts, -1) if part in layers else None
        found[part] = counts if each is None else counts.plus(each, layers[part] - 1)
        if part == "forward" and each is not None:
            again = each
    if config.student.activation_checkpointing:
        found["backward"] = found["backward"].plus(again, MODELS[recipe.student].layers)
    return found


def loss_as_it_is(recipe: Recipe, config: RunConfig, memory: float | None) -> Counts:
    """Count the loss with a kernel for each operation; memory: None for the least budget of a block."""
    return _counted(recipe, config, 1, memory, 1, compile_losses=False)["loss"]


def _counted(
    recipe: Recipe,
    config: RunConfig,
    layers: int,
    memory: float | None,
    tp: int,
    *,
    compile_losses: bool | None = None,
    fused_layers: bool = True,
) -> dict[str, Counts]:
    """Count the second of two microbatches: what is made once is made in the first."""
    student = MODELS[recipe.student]
    with counted(has_values=False) as work, _flash(work):
        batch = _batch(recipe, config)
        parts = _Parts(work)
        teachers = [_teacher(MODELS[name], layers, tp) for name in recipe.teachers]
        worker = _student(recipe, config, student, layers, memory, parts)
        if fused_layers:
            for each in (worker, *teachers):
                replace_parts(each.model)
        worker.config = config.model_copy(
            update={"train": config.train.model_copy(update={"compile_losses": compile_losses})}
        )
        for _ in range(2):
            parts.found.clear()
            read: list[Window] = []
            for name, teacher, rows in zip(recipe.teachers, teachers, batch.teachers, strict=True):
                with parts(f"teacher {name}"):
                    output = teacher.forward(rows.tokens, [slice(0, len(batch))])
                read += windows([output.handle], _SIDES, rows.tokens.packed_lengths)
            step = StudentStep(batch, tuple(read), worker.objective.normalizers(batch), (slice(0, len(batch)),), 1.0)
            for micro in worker._micro_batches(step):
                parts.rest("handoff")
                worker._accumulate(micro, step, ("kd", "ce", "policy"))
                parts.rest("loss")
            worker.model.zero_grad(set_to_none=True)
    return parts.found


class _Parts:
    """In the place of a worker's phases: what each asks for."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self.found: dict[str, Counts] = {}

    @contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        self.rest("handoff")
        yield
        self.rest(phase)

    def rest(self, phase: str) -> None:
        """Count what there has been since as a part of this phase."""
        work = self._work
        own = Counts(Counter(map(_kind, work.kernels)), work.waits.total(), work.copies.total())
        work.clear()
        self.found[phase] = self.found[phase].plus(own) if phase in self.found else own


def _kind(kernel: Kernel) -> Kind:
    known = ("attention", "compiled", "triton")
    name = next((each for each in known if kernel.name.startswith(each)), "product" if kernel.flops else "other")
    return Kind(name, kernel.num_bytes, kernel.flops)


class _InMemory(Sender):
    """A buffer of this process."""

    def _allocate(self, num_bytes: int) -> tuple[Tensor, tuple[object, ...]]:
        return torch.empty(num_bytes, dtype=torch.uint8, device=DEVICE), ()

    def _release(self) -> None: ...

    def _flush(self) -> None: ...


class _InProcess(Receiver):
    def _map(self, handle: Handle) -> Tensor:
        raise AssertionError("all buffers are of this process")

    def _is_near(self, handle: Handle) -> bool:
        return True

    def _collect(self) -> None: ...


_SIDES = LayoutPair(Layout(1), Layout(1), _ONE_PLACE, _ONE_PLACE)


def _teacher(shape: Shape, layers: int, tp: int) -> TeacherWorker:
    worker = object.__new__(TeacherWorker)
    model = _model(shape, layers, tp)
    worker.logit_rows = _headless(model)
    vocab = shape.more["vocab_size"]
    worker.writer = HiddenStatesWriter(
        lambda readers: _InMemory(readers, own=0),
        vocab,
        shape.width,
        torch.bfloat16,
        columns=range(vocab),
        readers=ONE_READER,
    )
    worker.device, worker.vocab_size, worker.score = str(DEVICE), vocab, None
    residence = DeviceOffload(model, worker.device, offload=False, empties_cache=False)
    mesh: Any = None  # for ranks that sample
    worker._source = TeacherModel(model=model, mesh=mesh, logit_rows=worker.logit_rows, use=residence.use)
    worker._tasks, worker._buffer_task = FrozenTasks(FORWARD, FORWARD, FORWARD), FORWARD
    return worker


def _student(
    recipe: Recipe, config: RunConfig, shape: Shape, layers: int, memory: float | None, phases: _Parts
) -> StudentWorker:
    worker = object.__new__(StudentWorker)
    worker.model, worker.device, worker.averaged_over = _model(shape, layers, 1).train(), str(DEVICE), 1
    worker.logit_rows = _headless(worker.model)
    worker.logit_rows.block_bytes = LEAST_BLOCK_BYTES if memory is None else block_bytes("cuda", int(memory))
    worker.vocab_size, sizes = shape.more["vocab_size"], [MODELS[name].more["vocab_size"] for name in recipe.teachers]
    is_same = [teacher.type == "same_tokenizer" for teacher in config.active_teachers]
    between = [None if same else projection(worker.vocab_size, size) for same, size in zip(is_same, sizes, strict=True)]
    worker.objective = build_objective(config, between, student_vocab_size=worker.vocab_size, teacher_vocab_sizes=sizes)
    worker.phases = phases  # type: ignore[assignment]
    worker.receiver = _InProcess(0)
    return worker


def _headless(model: PreTrainedModel) -> HiddenStateModel:
    made = HiddenStateModel(model, key="model")
    made._is_checked = True  # it is compared with the model's logits at the first call, which has no values here
    assert made.reads_packed
    return made


def _model(shape: Shape, layers: int, tp: int) -> PreTrainedModel:
    """Make a model of the device in bf16, as FSDP2 gathers it."""
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(
            shape.config(layers, tp), dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = made.setdefault(id(parameter), nn.Parameter(OnDevice(parameter.data)))
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else OnDevice(buffer)
    return model


@contextmanager
def _flash(work: Work) -> Iterator[None]:
    """Have flash attention inside, which the device lacks: a kernel forward, three backward, no square of scores."""
    before = packed_attention._within_sequences

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, flops: int) -> Tensor:
            ctx.shapes, ctx.flops = (query.shape, key.shape, value.shape), flops
            made = query.new_empty(1, query.shape[2], query.shape[1], value.shape[3])
            ctx.num_bytes = sum(each.nbytes for each in (query, key, value, made))
            work.kernels.append(Kernel("attention", ctx.num_bytes, flops))
            return made

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            for share, flops in ((1, 0), (2, 5 * ctx.flops // 2), (1, 0)):
                work.kernels.append(Kernel("attention", share * ctx.num_bytes, flops))
            return *(gradient.new_empty(shape) for shape in ctx.shapes), None

    def attend(_: nn.Module, query: Tensor, key: Tensor, value: Tensor, __: None, **more: Any) -> tuple[Tensor, None]:
        lengths = packed_attention.on_host(more["cu_seq_lens_q"]).diff().tolist()
        pairs = sum(length * (length + 1) // 2 for length in lengths)
        return Attention.apply(query, key, value, 4 * query.shape[1] * query.shape[3] * pairs), None

    AttentionInterface.register(packed_attention._PACKED, attend)
    try:
        yield
    finally:
        AttentionInterface.register(packed_attention._PACKED, before)


def _batch(recipe: Recipe, config: RunConfig) -> Batch:
    """Sequences of the recipe's lengths; across tokenizers every third chunk has two tokens."""
    own = _tokens(recipe.lengths, MODELS[recipe.student].more["vocab_size"])
    teachers = []
    for name, settings in zip(recipe.teachers, config.active_teachers, strict=True):
        if settings.type == "same_tokenizer":
            teachers.append(TeacherRows(own, None))
            continue
        places = torch.arange(own.ids.shape[1]).expand_as(own.ids)
        chunks = (places - (places + 1) // 4).masked_fill(places >= own.lengths.unsqueeze(1), -1).int()
        theirs = _tokens(recipe.lengths, MODELS[name].more["vocab_size"])
        teachers.append(TeacherRows(theirs, ChunkRows(chunks, chunks)))
    return Batch(own, tuple(teachers), _samples(own) if recipe.is_sampled else None)


def _tokens(lengths: Sequence[int], vocab_size: int) -> TokenRows:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (len(lengths), max(lengths)), generator=generator)
    known = torch.tensor(lengths)
    is_token = torch.arange(max(lengths)) < known.unsqueeze(1)
    scored = is_token.clone()
    scored[:, 0] = False
    return TokenRows(ids * is_token, known, scored, is_token.int())


def _samples(tokens: TokenRows) -> SampledRows:
    number, zeros = len(tokens), torch.zeros(tokens.ids.shape)
    return SampledRows(torch.ones(number, dtype=torch.bool), zeros, zeros, torch.zeros(number), torch.arange(number))


def work_of(recipe: Recipe, config: RunConfig, peak: float) -> tuple[Utilization, Batch]:
    """Return what any implementation has to do for a microbatch, for the MFU of one GPU of this peak."""
    sizes = [model_size(MODELS[name].config()) for name in (recipe.student, *recipe.teachers)]
    return Utilization(sizes[0], tuple(sizes[1:]), 1, peak), _batch(recipe, config)
