"""Memory parts of a rank's processes, the student's and each teacher's, and the batches that they sample."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil

from nemo_opd.config.model import Student
from nemo_opd.config.on_policy import longest_prompt
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.logits.blocks import least_rows
from nemo_opd.losses.cross_entropy import LIVE_COPIES
from nemo_opd.models.load import compute_dtype
from nemo_opd.preflight import memory_parts
from nemo_opd.preflight.memory_parts import (
    FP32,
    LOADED,
    STEP,
    STUDENT_PHASES,
    MemoryInputs,
    ModelSetup,
    Part,
    Phase,
    constant_part,
)
from nemo_opd.preflight.model_info import cut_numel, shard_numel
from nemo_opd.preflight.teachers import output_columns
from nemo_opd.rollout.base import BatchLimit

_STUDENT = "student"
_TURN = (Phase.TEACHERS, Phase.ANSWERS)
"""Phases of the teachers' computation."""
_COPIES = 12
"""fp32 copies of a chunk's logits alive at once in the most expensive distillation loss."""
_BYTES_PER_LOGIT = 36
"""Bytes per logit for sampling a token: fp32 logits, warped logits, probabilities, fp64 cumulative sums, masks."""
SAMPLING = (
    "parameters, gathered whole",
    "key-value cache",
    "activations of sampling",
    "logits and what is drawn from them",
)
"""Names of the parts of sampling."""


def student_parts(config: RunConfig, situation: MemoryInputs) -> list[Part]:
    """Return the parts of the student's process, without the teachers inside it."""
    student, setup = config.student, situation.student
    c = compute_dtype(student.dtype, situation.device).itemsize
    weights, optimizer = setup.student_bytes(c), memory_parts.state_bytes(student.optimizer, setup.size, setup.layout)
    leaves = student.offload is True and situation.device == "cuda"
    on_device = (Phase.LOADING, Phase.ROLLOUT, *STUDENT_PHASES) if leaves else tuple(Phase)
    copied = sum(teacher.copied_bytes(setup.layout.dp) for teacher in teacher_processes(config, situation))
    averages = sum(teacher.weights == "ema" for teacher in config.active_teachers)
    saved = (1 + averages) * FP32 * setup.trained + optimizer if config.train.async_save else 0
    batch = student_batch(config, setup.layout.dp) if student_samples(config) else None
    # log R₀ in fp64, and Δ with its moments and gradient; in the loss also log R, its gradient and an fp64 temporary.
    learned = {phase: (48 if phase is Phase.LOSS else 24) * situation.num_learned for phase in Phase}
    return [
        constant_part(_STUDENT, "parameters", weights, *on_device),
        # Before the first step the optimizer has no state.
        constant_part(_STUDENT, "optimizer", optimizer, *(STUDENT_PHASES if leaves else STEP)),
        *_pass_parts(config, situation, c),
        *_loss_parts(config, situation, c),
        constant_part(_STUDENT, "teachers' output, copied", copied, *_output_phases(config)),
        constant_part(_STUDENT, "output of teachers on other nodes", situation.arriving, *_output_phases(config)),
        *_sampling_parts(_STUDENT, Phase.ROLLOUT, setup, student, situation.device, batch),
        Part(_STUDENT, "learned projections", learned),
        constant_part(_STUDENT, "parameters, optimizer", (weights + optimizer) * leaves, *LOADED, on_host=True),
        constant_part(_STUDENT, "copy of the checkpoint being written", saved, *STEP, on_host=True),
    ]


def _pass_parts(config: RunConfig, situation: MemoryInputs, c: int) -> list[Part]:
    """Return the parts of a forward and a backward pass.

    The backward pass counts the largest of three moments: in the last layer all activations are alive, in the first
    layer the other layers' gradients, at the end the gradients of embedding and head. FSDP2 reduces gradients in fp32,
    from a copy of the unsharded ones; if they are reduced once per step, all unsharded ones accumulate until then.
    Comparing the gradients of KD and CE keeps one more set.
    """
    train, setup, student = config.train, situation.student, config.student
    size, tp, is_sharded = setup.size, setup.layout.tp, setup.is_sharded(student, c)
    gradients, compared = FP32 * setup.trained, config.logging.gradients_every is not None
    # From the second microbatch on, earlier gradients are alive.
    has_several = train.global_batch_size > setup.layout.dp * max(1, train.tokens_at_a_time // train.max_length)
    is_summed_whole = is_sharded and has_several and student.sync_each_micro_batch is False
    summed = FP32 * cut_numel(size.trained_shapes, tp) if is_summed_whole else 0
    before_pass, after_pass = gradients * (compared + (has_several and not is_summed_whole)), gradients * (compared + 1)
    work = setup.work(student, train.longest_at_a_time(setup.layout.dp), train.max_length, situation.device)
    saved = memory_parts.saved_activations(size, work, checkpointing=student.activation_checkpointing)
    recomputed = max(memory_parts.layer_bytes(layer, work) for layer in size.layers) * student.activation_checkpointing
    working = recomputed + memory_parts.temporaries(size, work)
    unsharded = (c + FP32) * is_sharded
    layer = unsharded * max(cut_numel(layer.trained_shapes, tp) for layer in size.layers)
    outside = 0 if size.adapters else unsharded * setup.rest
    moments = (before_pass, layer, saved + working), (after_pass, layer, working), (after_pass, outside, 0)
    accumulated, unsharded_gradients, activations = max(moments, key=sum)
    return [
        constant_part(_STUDENT, "gathered parameters", sum(setup.gathered(student, c)), Phase.LOSS, Phase.BACKWARD),
        Part(
            _STUDENT, "gradients", {Phase.LOSS: before_pass, Phase.BACKWARD: accumulated, Phase.OPTIMIZER: after_pass}
        ),
        Part(_STUDENT, "unsharded gradients", {Phase.LOSS: summed, Phase.BACKWARD: summed + unsharded_gradients}),
        Part(_STUDENT, "activations", {Phase.LOSS: saved, Phase.BACKWARD: activations}),
    ]


def _loss_parts(config: RunConfig, situation: MemoryInputs, c: int) -> list[Part]:
    """Return the parts of the loss.

    If logits are handed over: whole logits and their gradient; a soft cap also keeps the tanh. Otherwise: the
    gradients of hidden states and head, and blocks of logits. Context-parallel ranks gather the hidden states. In the
    loss phase the head's gradient is summed in fp32, next to a copy in the compute dtype if that is lower; only the
    latter is left afterwards. All heads compute equally many rows at a time, which share the block's budget.
    """
    setup, budget = situation.student, situation.block_bytes
    size, rows, length = setup.size, config.train.longest_at_a_time(setup.layout.dp), config.train.max_length
    columns = setup.columns(size.vocab_size)
    vocab_sizes = [model.vocab_size for model in (setup, *situation.teachers)]
    logits = rows * length * FP32 * max(vocab_sizes)
    chunk = min(budget, (_COPIES if situation.teachers else LIVE_COPIES) * logits)
    if config.handoff.type == "logits":
        with_gradients = rows * -(-length // setup.layout.cp) * columns * c * (4 if size.has_soft_cap else 2)
        return [
            constant_part(_STUDENT, "logits and their gradients", with_gradients, Phase.LOSS, Phase.BACKWARD),
            constant_part(_STUDENT, "temporaries of a loss", chunk, Phase.LOSS),
        ]
    head = 0 if size.adapters else columns * size.hidden_size
    hidden = rows * length * size.hidden_size * c * min(2, setup.layout.cp)
    head_gradient = {Phase.LOSS: (FP32 + c * (c < FP32)) * head, Phase.BACKWARD: c * head}
    at_once = max(budget // (FP32 * sum(vocab_sizes)), least_rows(situation.device))
    blocks = FP32 * min(at_once, rows * length) * (sum(vocab_sizes) + setup.vocab_size)
    return [
        constant_part(_STUDENT, "gradients of hidden states", hidden, Phase.LOSS, Phase.BACKWARD),
        Part(_STUDENT, "gradient of the head", head_gradient),
        constant_part(_STUDENT, "blocks of logits, temporaries of a loss", blocks + chunk, Phase.LOSS),
    ]


@dataclass(frozen=True, slots=True)
class TeacherProcess:
    """One rank of a teacher, in its own process or in the student's."""

    config: RunConfig
    settings: Teacher
    setup: ModelSetup
    situation: MemoryInputs

    @property
    def item_bytes(self) -> int:
        return compute_dtype(self.settings.dtype, self.situation.device).itemsize

    @property
    def width(self) -> int:
        """Positions of the teacher's longest sequence."""
        return ceil(self.setup.stretch * self.config.train.max_length)

    @property
    def rows(self) -> int:
        """Sequences of a batch on this rank."""
        return -(-self.config.train.global_batch_size // self.setup.layout.dp)

    @property
    def output(self) -> tuple[int, int, str]:
        """Width of the output (for logits, over all ranks), bytes per element, and kind of output."""
        settings, setup = self.settings, self.setup
        columns, itemsize = output_columns(self.config, settings, setup.size, self.situation.device)
        if columns is None:
            return setup.vocab_size, itemsize, "logits"
        return columns, itemsize, "hidden states" if settings.is_computed or itemsize > 1 else "likeliest tokens"

    def parts(self) -> list[Part]:
        """Return all parts of this rank."""
        name, config, settings, handed_over = self.settings.name, self.config, self.settings, self.handed_over()
        if not settings.is_computed:
            return [constant_part(name, "head", handed_over[1].at(Phase.LOSS), *Phase), *handed_over]
        model = config.student if settings.is_student else settings
        batch = teacher_batch(config, settings) if teachers_answer(config) else None
        return [
            *(self._shared_weights() if settings.is_student else self._separate_weights()),
            constant_part(name, "activations", self._activations(), Phase.TEACHERS, in_turn=True),
            *handed_over,
            *_sampling_parts(name, Phase.ANSWERS, self.setup, model, self.situation.device, batch),
        ]

    def handed_over(self) -> list[Part]:
        """Return the buffers for all batches in flight and for the head: this rank's rows and columns.

        They hold all positions, even under context parallelism.
        """
        name, (columns, itemsize, kind) = self.settings.name, self.output
        rank_columns = self.setup.columns(self.setup.vocab_size)
        batches = 1 if self.settings.is_student else 1 + self.config.batches_ahead
        numel = batches * self.rows * self.width * (rank_columns if kind == "logits" else columns)
        head = rank_columns * columns if kind == "hidden states" else 0
        phases, on_host = _output_phases(self.config), self.situation.through_host
        return [
            constant_part(name, f"{kind} handed over", numel * itemsize, *phases, on_host=on_host),
            constant_part(name, "head handed over", head * itemsize, *phases, on_host=on_host),
        ]

    def copied_bytes(self, student_dp: int) -> int:
        """Return the bytes of output for a microbatch, and of the head, that a student rank copies.

        If the student's device reads the buffers directly, it copies only sequences that are spread over several
        teacher ranks.
        """
        columns, itemsize, kind = self.output
        through_host = self.situation.through_host
        positions = self.config.train.longest_at_a_time(student_dp) * self.width
        head = self.setup.vocab_size if through_host and kind == "hidden states" else 0
        return itemsize * columns * (head + (positions if through_host or student_dp % self.setup.layout.dp else 0))

    def _activations(self) -> int:
        """Return the larger of a layer's temporaries and the microbatch's final hidden states and logits, in bytes.

        A soft cap makes two more tensors of logits.
        """
        setup, budget = self.setup, self.settings.micro_batch_tokens
        at_once = self.config.train.longest_at_a_time(setup.layout.dp) if budget is None else -(-budget // self.width)
        work = setup.work(self.settings, min(self.rows, at_once), self.width, self.situation.device)
        columns = setup.size.hidden_size
        if self.config.handoff.type == "logits":
            columns += setup.columns(setup.size.vocab_size) * (3 if setup.size.has_soft_cap else 1)
        return max(memory_parts.temporaries(setup.size, work), work.tokens * columns * work.itemsize)

    def _separate_weights(self) -> list[Part]:
        """Return the weights of a teacher with a separate process; if offloaded, main memory keeps a copy.

        Parameters outside the layers stay gathered by FSDP2 until the model moves.
        """
        name, setup, offload, c = self.settings.name, self.setup, self.settings.offload, self.item_bytes
        leaves = offload in (True, "layers") and self.situation.device == "cuda"
        shard = on_device = c * setup.shard
        if leaves and offload == "layers":  # parameters outside the layers, the current layer and the next
            largest_layers = sorted(shard_numel(layer.shapes, setup.layout) for layer in setup.size.layers)[-2:]
            on_device = c * (shard_numel(setup.size.rest, setup.layout) + sum(largest_layers))
        stay, layers = setup.gathered(self.settings, c)
        return [
            constant_part(name, "parameters", on_device, *((Phase.LOADING,) if leaves else Phase)),
            constant_part(name, "parameters", on_device * leaves, *_TURN, in_turn=True),
            constant_part(name, "gathered parameters", stay * (not leaves), *_output_phases(self.config)),
            constant_part(name, "gathered parameters", layers + stay * leaves, Phase.TEACHERS, in_turn=True),
            constant_part(name, "parameters", shard * leaves, *LOADED, on_host=True),
        ]

    def _shared_weights(self) -> list[Part]:
        """Return the parts that a teacher with the student's weights adds to the student's process.

        The student's weights count here only if they return to the device for this teacher. An average of them is
        always on the device, or with `offload` only while it is read or updated.
        """
        name, setup, student = self.settings.name, self.setup, self.config.student
        is_gpu, gathered = self.situation.device == "cuda", sum(setup.gathered(student, self.item_bytes))
        average = FP32 * setup.trained if self.settings.weights == "ema" else 0
        leaves = self.settings.offload is True and is_gpu
        reloaded = setup.student_bytes(self.item_bytes) if student.offload is True and is_gpu else 0
        return [
            constant_part(name, "average", average, *((Phase.LOADING, Phase.OPTIMIZER) if leaves else Phase)),
            constant_part(name, "average", average * leaves, *_TURN, in_turn=True),
            constant_part(name, "average", average * leaves, *LOADED, on_host=True),
            constant_part(name, "the student's parameters", reloaded, *_TURN, in_turn=True),
            constant_part(name, "gathered parameters", gathered, Phase.TEACHERS, in_turn=True),
        ]


def teacher_processes(config: RunConfig, situation: MemoryInputs) -> list[TeacherProcess]:
    teachers = zip(config.active_teachers, situation.teachers, strict=True)
    return [TeacherProcess(config, settings, setup, situation) for settings, setup in teachers]


def _output_phases(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases with teacher output in memory: from the first batch on, which may be one of validation."""
    return LOADED if config.data.validation.given else STEP


def _sampling_parts(
    owner: str, phase: Phase, setup: ModelSetup, model: Student | Teacher, device: str, batch: SamplingBatch | None
) -> list[Part]:
    """Return the parts of transformers' `generate` for this batch or a benchmark's longest question.

    The larger of two moments counts: reading the prompts, or sampling the last token. At the latter, activations are a
    copy of one layer's keys: the cache grows by copying. Ranks of a context-parallel group sample whole sequences.
    """
    size, tp, moments = setup.size, setup.layout.tp, [(0, 0, 0)]
    c = compute_dtype(model.dtype, device).itemsize
    question = SamplingBatch(1, setup.longest_question - 1, 1) if setup.longest_question else None
    for sampled in filter(None, (batch, question)):
        rows, prompt = sampled.rows, sampled.prompt
        work = replace(setup.work(model, rows, prompt, device), tokens=rows * prompt, stream_share=1)
        read = memory_parts.cache_bytes(size, tp, c, rows, prompt, is_read=False)
        end = memory_parts.cache_bytes(size, tp, c, rows, prompt + sampled.new - 1)
        logits = rows * size.vocab_size * _BYTES_PER_LOGIT
        moments += [(read, memory_parts.temporaries(size, work), 0), (end, end // (2 * len(size.layers)), logits)]
    gathered = c * setup.whole if len(moments) > 1 and setup.is_sharded(model, c) else 0
    largest = (gathered, *max(moments, key=sum))
    return [
        constant_part(owner, name, num_bytes, phase, in_turn=True)
        for name, num_bytes in zip(SAMPLING, largest, strict=True)
    ]


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """Batch of sequences that are sampled together."""

    rows: int
    """Number of sequences."""
    prompt: int
    """Tokens of the longest prompt; all prompts are padded to it."""
    new: int
    """Tokens of the longest continuation."""

    @property
    def limit(self) -> BatchLimit:
        """The same number of sequences and tokens as a limit; longer sequences get smaller batches."""
        return BatchLimit(self.rows, self.rows * (self.prompt + self.new))


def student_samples(config: RunConfig) -> bool:
    """Return whether the student's workers sample: rollouts, or answers in an off-policy run."""
    if config.rollout is None:
        return config.evaluation is not None
    return isinstance(config.rollout, HFRollout)


def teachers_answer(config: RunConfig) -> bool:
    """Return whether teachers answer evaluation questions."""
    return config.evaluation is not None and config.evaluation.teachers and bool(config.active_teachers)


def student_batch(config: RunConfig, dp: int) -> SamplingBatch:
    """Return the student's largest batch of rollouts or answers on one of `dp` data-parallel ranks."""
    rollout, questions, longest = config.rollout, config.evaluation, config.train.max_length
    if questions is None:
        assert isinstance(rollout, HFRollout)
        rows = min(rollout.batch_size, -(-config.train.global_batch_size // dp))
        return _batch(config, rows, rollout.max_new_tokens, longest)
    rows, new = questions.batch_size, 1
    if isinstance(rollout, HFRollout):
        rows, new = rollout.batch_size, rollout.max_new_tokens
    return _batch(config, rows, max(new, _longest_answer(config)), longest)


def teacher_batch(config: RunConfig, settings: Teacher) -> SamplingBatch:
    """Return a teacher's largest batch of answers."""
    assert config.evaluation is not None
    max_length = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
    longest = max_length or config.train.max_length
    return _batch(config, config.evaluation.teacher_batch_size, _longest_answer(config), longest)


def _longest_answer(config: RunConfig) -> int:
    assert config.evaluation is not None
    return max(map(config.new_tokens, config.evaluation.all_sets or [""]))


def _batch(config: RunConfig, rows: int, new: int, longest: int) -> SamplingBatch:
    """Return a batch of `rows` sequences with at most `longest` of the model's tokens.

    The prompt's length is the student's times longest / `train.max_length`; with an environment, all but one token:
    a later turn's prompt may leave room for just one.
    """
    scaled = -(-longest_prompt(config) * longest // config.train.max_length)
    prompt = longest - 1 if config.environment is not None else min(longest - 1, scaled)
    return SamplingBatch(rows, prompt, min(new, longest - 1))
