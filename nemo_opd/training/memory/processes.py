"""Parts of the processes of a rank: the student's, and each teacher's."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.logits.blocks import least_rows
from nemo_opd.losses.surprise import LIVE_COPIES
from nemo_opd.models.load import compute_dtype
from nemo_opd.training.memory import formulas
from nemo_opd.training.memory.formulas import FP32
from nemo_opd.training.memory.parts import LOADED, STEP, STUDENT_PHASES, Part, Phase, part
from nemo_opd.training.memory.situation import ModelSetup, Situation
from nemo_opd.training.model_size import cut_numel, shard_numel
from nemo_opd.training.sampling_batches import (
    SamplingBatch,
    student_batch,
    student_samples,
    teacher_batch,
    teachers_answer,
)
from nemo_opd.training.teacher_output import output_columns

_STUDENT = "student"
_TURN = (Phase.TEACHERS, Phase.ANSWERS)
"""Phases in which teachers work."""
_COPIES = 12
"""fp32 tensors of a chunk's logits alive at once in the distillation loss that needs most."""
_BYTES_PER_LOGIT = 36
"""Bytes per logit for sampling a token: logits in fp32 and warped, probabilities, their sums in fp64, masks."""
SAMPLING = (
    "parameters, gathered whole",
    "key-value cache",
    "activations of sampling",
    "logits and what is drawn from them",
)
"""Names of parts."""


def student_parts(config: RunConfig, situation: Situation) -> list[Part]:
    """Return the parts of the student's process, without teachers that are in it."""
    student, setup = config.student, situation.student
    c = compute_dtype(student.dtype, situation.device).itemsize
    weights, optimizer = setup.student_bytes(c), formulas.state_bytes(student.optimizer, setup.size, setup.layout)
    leaves = student.offload is True and situation.device == "cuda"
    here = (Phase.LOADING, Phase.ROLLOUT, *STUDENT_PHASES) if leaves else tuple(Phase)
    copied = sum(each.copied_bytes(setup.layout.dp) for each in teacher_processes(config, situation))
    averages = sum(teacher.weights == "ema" for teacher in config.active_teachers)
    saved = (1 + averages) * FP32 * setup.trained + optimizer if config.train.async_save else 0
    batch = student_batch(config, setup.layout.dp) if student_samples(config) else None
    # log R₀ in fp64 and Δ, its moments and its gradient; and in the loss log R, its gradient and a temporary in fp64.
    learned = {phase: (48 if phase is Phase.LOSS else 24) * situation.num_learned for phase in Phase}
    return [
        part(_STUDENT, "parameters", weights, *here),
        # Before the first step the optimizer has no state.
        part(_STUDENT, "optimizer", optimizer, *(STUDENT_PHASES if leaves else STEP)),
        *_pass_parts(config, situation, c),
        *_loss_parts(config, situation, c),
        part(_STUDENT, "teachers' output, copied", copied, *_with_output(config)),
        part(_STUDENT, "output of teachers on other nodes", situation.arriving, *_with_output(config)),
        *_sampling_parts(_STUDENT, Phase.ROLLOUT, setup, student, situation.device, batch),
        Part(_STUDENT, "learned projections", learned),
        part(_STUDENT, "parameters, optimizer", (weights + optimizer) * leaves, *LOADED, on_host=True),
        part(_STUDENT, "copy of the checkpoint being written", saved, *STEP, on_host=True),
    ]


def _pass_parts(config: RunConfig, situation: Situation, c: int) -> list[Part]:
    """Return the parts of a forward and a backward pass.

    The largest of three moments of the backward pass counts: all activations are alive in the last layer, the other
    layers' gradients in the first one, and the gradients of embedding and head at the end. FSDP2 sums gradients in
    fp32, from a copy of the unsharded ones; those that are reduced once a step are all there until then. A comparison
    of the gradients of KD and CE keeps one more set.
    """
    train, setup, student = config.train, situation.student, config.student
    size, tp, is_sharded = setup.size, setup.layout.tp, setup.is_sharded(student, c)
    gradients, compared = FP32 * setup.trained, config.logging.gradients_every is not None
    # Earlier microbatches have left gradients.
    has_several = train.global_batch_size > setup.layout.dp * max(1, train.tokens_at_a_time // train.max_length)
    is_summed_whole = is_sharded and has_several and student.sync_each_micro_batch is False
    summed = FP32 * cut_numel(size.trained_shapes, tp) if is_summed_whole else 0
    before, after = gradients * (compared + (has_several and not is_summed_whole)), gradients * (compared + 1)
    work = setup.work(student, train.longest_at_a_time(setup.layout.dp), train.max_length, situation.device)
    saved = formulas.saved_activations(size, work, checkpointing=student.activation_checkpointing)
    recomputed = max(formulas.layer_bytes(layer, work) for layer in size.layers) * student.activation_checkpointing
    working = recomputed + formulas.temporaries(size, work)
    unsharded = (c + FP32) * is_sharded
    layer = unsharded * max(cut_numel(layer.trained_shapes, tp) for layer in size.layers)
    rest = 0 if size.adapters else unsharded * setup.rest
    moments = (before, layer, saved + working), (after, layer, working), (after, rest, 0)
    held, of_layer, activations = max(moments, key=sum)
    return [
        part(_STUDENT, "gathered parameters", sum(setup.gathered(student, c)), Phase.LOSS, Phase.BACKWARD),
        Part(_STUDENT, "gradients", {Phase.LOSS: before, Phase.BACKWARD: held, Phase.OPTIMIZER: after}),
        Part(_STUDENT, "unsharded gradients", {Phase.LOSS: summed, Phase.BACKWARD: summed + of_layer}),
        Part(_STUDENT, "activations", {Phase.LOSS: saved, Phase.BACKWARD: activations}),
    ]


def _loss_parts(config: RunConfig, situation: Situation, c: int) -> list[Part]:
    """Return whole logits and their gradient, or where losses read hidden states their gradient and blocks of logits.

    A soft cap keeps the tanh of whole logits. Context-parallel ranks have gathered hidden states. The head's gradient
    is in fp32, and at first also in a lower compute precision. All heads make equally many rows, which share the
    block's budget.
    """
    setup, budget = situation.student, situation.block_bytes
    size, rows, length = setup.size, config.train.longest_at_a_time(setup.layout.dp), config.train.max_length
    columns = setup.columns(size.vocab_size)
    vocab_sizes = [each.vocab_size for each in (setup, *situation.teachers)]
    whole = rows * length * FP32 * max(vocab_sizes)
    chunk = min(budget, (_COPIES if situation.teachers else LIVE_COPIES) * whole)
    if config.handoff.type == "logits":
        logits = rows * -(-length // setup.layout.cp) * columns * c * (4 if size.has_soft_cap else 2)
        return [
            part(_STUDENT, "logits and their gradients", logits, Phase.LOSS, Phase.BACKWARD),
            part(_STUDENT, "temporaries of a loss", chunk, Phase.LOSS),
        ]
    head = 0 if size.adapters else columns * size.hidden_size
    hidden = rows * length * size.hidden_size * c * min(2, setup.layout.cp)
    of_head = {Phase.LOSS: (FP32 + c * (c < FP32)) * head, Phase.BACKWARD: c * head}
    at_once = max(budget // (FP32 * sum(vocab_sizes)), least_rows(situation.device))
    blocks = FP32 * min(at_once, rows * length) * (sum(vocab_sizes) + setup.vocab_size)
    return [
        part(_STUDENT, "gradients of hidden states", hidden, Phase.LOSS, Phase.BACKWARD),
        Part(_STUDENT, "gradient of the head", of_head),
        part(_STUDENT, "blocks of logits, temporaries of a loss", blocks + chunk, Phase.LOSS),
    ]


@dataclass(frozen=True, slots=True)
class TeacherProcess:
    """A rank of a teacher."""

    config: RunConfig
    settings: Teacher
    setup: ModelSetup
    situation: Situation

    @property
    def item_bytes(self) -> int:
        return compute_dtype(self.settings.dtype, self.situation.device).itemsize

    @property
    def width(self) -> int:
        """Number of positions of a sequence."""
        return ceil(self.setup.stretch * self.config.train.max_length)

    @property
    def rows(self) -> int:
        """Number of sequences of a batch."""
        return -(-self.config.train.global_batch_size // self.setup.layout.dp)

    @property
    def output(self) -> tuple[int, int, str]:
        """Columns of its output, of logits those of all ranks, the bytes of a number there, and what it is."""
        settings, setup = self.settings, self.setup
        columns, itemsize = output_columns(self.config, settings, setup.size, self.situation.device)
        if columns is None:
            return setup.vocab_size, itemsize, "logits"
        return columns, itemsize, "hidden states" if settings.is_computed or itemsize > 1 else "likeliest tokens"

    def parts(self) -> list[Part]:
        """Return all of its parts, with those that it has in its turn alone."""
        name, config, settings, handed_over = self.settings.name, self.config, self.settings, self.handed_over()
        if not settings.is_computed:
            return [part(name, "head", handed_over[1].at(Phase.LOSS), *Phase), *handed_over]
        model = config.student if settings.is_student else settings
        batch = teacher_batch(config, settings) if teachers_answer(config) else None
        return [
            *(self._students_weights() if settings.is_student else self._own_weights()),
            part(name, "activations", self._activations(), Phase.TEACHERS, in_turn=True),
            *handed_over,
            *_sampling_parts(name, Phase.ANSWERS, self.setup, model, self.situation.device, batch),
        ]

    def handed_over(self) -> list[Part]:
        """Return the buffers of all batches in flight and of the head: this rank's rows and columns.

        They have all positions, even under context parallelism.
        """
        name, (columns, itemsize, what) = self.settings.name, self.output
        own = self.setup.columns(self.setup.vocab_size)
        batches = 1 if self.settings.is_student else 1 + self.config.batches_ahead
        numbers = batches * self.rows * self.width * (own if what == "logits" else columns)
        head = own * columns if what == "hidden states" else 0
        phases, on_host = _with_output(self.config), self.situation.through_host
        return [
            part(name, f"{what} handed over", numbers * itemsize, *phases, on_host=on_host),
            part(name, "head handed over", head * itemsize, *phases, on_host=on_host),
        ]

    def copied_bytes(self, student_dp: int) -> int:
        """Return the bytes that a rank of the student copies of its output for a microbatch, and of its head.

        Where its device reads the buffers, it copies nothing of a teacher of which one rank has all of its sequences.
        """
        columns, itemsize, what = self.output
        through_host = self.situation.through_host
        positions = self.config.train.longest_at_a_time(student_dp) * self.width
        head = self.setup.vocab_size if through_host and what == "hidden states" else 0
        return itemsize * columns * (head + (positions if through_host or student_dp % self.setup.layout.dp else 0))

    def _activations(self) -> int:
        """Return the temporaries of a layer, or at the end the hidden states and logits of a microbatch.

        A soft cap makes two more tensors of logits.
        """
        setup, own = self.setup, self.settings.micro_batch_tokens
        at_once = self.config.train.longest_at_a_time(setup.layout.dp) if own is None else -(-own // self.width)
        work = setup.work(self.settings, min(self.rows, at_once), self.width, self.situation.device)
        numbers = setup.size.hidden_size
        if self.config.handoff.type == "logits":
            numbers += setup.columns(setup.size.vocab_size) * (3 if setup.size.has_soft_cap else 1)
        return max(formulas.temporaries(setup.size, work), work.tokens * numbers * work.itemsize)

    def _own_weights(self) -> list[Part]:
        """Return the weights of a teacher with a separate process, of which main memory keeps a copy if they leave.

        What FSDP2 has gathered outside of layers stays until the model moves.
        """
        name, setup, offload, t = self.settings.name, self.setup, self.settings.offload, self.item_bytes
        leaves = offload in (True, "layers") and self.situation.device == "cuda"
        whole = here = t * setup.shard
        if leaves and offload == "layers":  # all outside of layers, the one that computes, and the next
            at_once = sorted(shard_numel(layer.shapes, setup.layout) for layer in setup.size.layers)[-2:]
            here = t * (shard_numel(setup.size.rest, setup.layout) + sum(at_once))
        stay, layers = setup.gathered(self.settings, t)
        return [
            part(name, "parameters", here, *((Phase.LOADING,) if leaves else Phase)),
            part(name, "parameters", here * leaves, *_TURN, in_turn=True),
            part(name, "gathered parameters", stay * (not leaves), *_with_output(self.config)),
            part(name, "gathered parameters", layers + stay * leaves, Phase.TEACHERS, in_turn=True),
            part(name, "parameters", whole * leaves, *LOADED, on_host=True),
        ]

    def _students_weights(self) -> list[Part]:
        """Return what a teacher with the student's weights adds to the student's process.

        The student's own weights count here only where they are on the device for this teacher. An average of them is
        on the device always, or with `offload` when it is read and updated.
        """
        name, setup, student = self.settings.name, self.setup, self.config.student
        is_gpu, gathered = self.situation.device == "cuda", sum(setup.gathered(student, self.item_bytes))
        average = FP32 * setup.trained if self.settings.weights == "ema" else 0
        leaves = self.settings.offload is True and is_gpu
        brought = setup.student_bytes(self.item_bytes) if student.offload is True and is_gpu else 0
        return [
            part(name, "average", average, *((Phase.LOADING, Phase.OPTIMIZER) if leaves else Phase)),
            part(name, "average", average * leaves, *_TURN, in_turn=True),
            part(name, "average", average * leaves, *LOADED, on_host=True),
            part(name, "the student's parameters", brought, *_TURN, in_turn=True),
            part(name, "gathered parameters", gathered, Phase.TEACHERS, in_turn=True),
        ]


def teacher_processes(config: RunConfig, situation: Situation) -> list[TeacherProcess]:
    given = zip(config.active_teachers, situation.teachers, strict=True)
    return [TeacherProcess(config, settings, setup, situation) for settings, setup in given]


def _with_output(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases with teachers' output: from the first batch on, which validation moves before the answers."""
    return LOADED if config.data.validation.given else STEP


def _sampling_parts(
    owner: str, phase: Phase, setup: ModelSetup, model: Student | Teacher, device: str, batch: SamplingBatch | None
) -> list[Part]:
    """Return the parts of transformers' `generate`: of this batch, or of a benchmark's longest question alone.

    The largest moment counts: reading the prompts, or sampling the last token. At the second, a copy of one layer's
    keys, which grow by copying, counts as activations. Ranks of a context-parallel group sample whole sequences.
    """
    size, tp, moments = setup.size, setup.layout.tp, [(0, 0, 0)]
    c = compute_dtype(model.dtype, device).itemsize
    question = SamplingBatch(1, setup.longest_question - 1, 1) if setup.longest_question else None
    for rows, prompt, new in ((each.rows, each.prompt, each.new) for each in (batch, question) if each is not None):
        work = replace(setup.work(model, rows, prompt, device), tokens=rows * prompt, stream_share=1)
        read = formulas.cache_bytes(size, tp, c, rows, prompt, is_read=False)
        end = formulas.cache_bytes(size, tp, c, rows, prompt + new - 1)
        logits = rows * size.vocab_size * _BYTES_PER_LOGIT
        moments += [(read, formulas.temporaries(size, work), 0), (end, end // (2 * len(size.layers)), logits)]
    gathered = c * setup.whole if len(moments) > 1 and setup.is_sharded(model, c) else 0
    largest = (gathered, *max(moments, key=sum))
    return [part(owner, name, each, phase, in_turn=True) for name, each in zip(SAMPLING, largest, strict=True)]
