"""Memory of a teacher's process, and of its output in the student's process."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from math import ceil

from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.logits.blocks import block_bytes
from nemo_opd.models.load import compute_dtype
from nemo_opd.models.stored_output import sparse_layout
from nemo_opd.rollout.base import BatchLimit
from nemo_opd.served.answers import served_layout
from nemo_opd.teacher_cache.manifest import read_manifest
from nemo_opd.training.memory.activations import working_bytes
from nemo_opd.training.memory.parts import Part, Phase, Process, part
from nemo_opd.training.memory.sampling import SamplingBatch, longest_answer, sampling_batch, sampling_parts
from nemo_opd.training.memory.situation import ModelSetup, Situation, teachers_ahead
from nemo_opd.training.memory.size import FP32, ModelSize

_HEAD = "head handed over"
"""Name of a part."""


def teachers_answer(config: RunConfig) -> bool:
    """Return whether teachers answer the evaluation's questions."""
    return config.evaluation is not None and config.evaluation.teachers and bool(config.active_teachers)


def teacher_processes(config: RunConfig, situation: Situation) -> list[Process]:
    """Return every teacher's process. Of teachers that take turns in a phase, the one that needs most has its turn."""
    jobs = teacher_jobs(config, situation)
    working: list[set[Phase]] = [set() for _ in jobs]
    for phase in _work(config):
        at_once = config.cluster.placement == "separate" and (
            phase is Phase.TEACHERS or situation.machine.device == "cuda"
        )
        in_turn = [i for i, job in enumerate(jobs) if job.settings.is_student or not at_once]
        largest = max(in_turn, key=lambda i: _more_at_work(jobs[i], phase), default=None)
        for i, phases in enumerate(working):
            if i not in in_turn or i == largest:
                phases.add(phase)
    return [_process(job, phases) for job, phases in zip(jobs, working, strict=True)]


def teachers_at_work(config: RunConfig, situation: Situation) -> list[Process]:
    """Return every teacher's process as it is in its own turns."""
    return [_process(job, _work(config)) for job in teacher_jobs(config, situation)]


def _work(config: RunConfig) -> tuple[Phase, ...]:
    return (Phase.TEACHERS, Phase.ANSWERS) if teachers_answer(config) else (Phase.TEACHERS,)


def _more_at_work(job: TeacherJob, phase: Phase) -> int:
    """Return the bytes that a teacher needs more on its device in its turn than while it waits."""
    at_work, waiting = (sum(each.at(phase) for each in _process(job, work).device) for work in ((phase,), ()))
    return at_work - waiting


def reading_phases(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases with teachers' output: from the first batch on, which validation moves before the answers."""
    without = {Phase.LOADING} if config.data.validation.given else {Phase.LOADING, Phase.ANSWERS}
    return tuple(phase for phase in Phase if phase not in without)


def window_bytes(config: RunConfig, situation: Situation) -> int:
    """Return the bytes of all teachers' output for a microbatch that a student's rank has to copy.

    Where its device reads the buffers, it copies none of a teacher of which one rank has all of its sequences.
    """
    dp = situation.student.layout.dp
    jobs = teacher_jobs(config, situation)
    return sum(job.window_bytes(dp) for job in jobs if situation.through_host or dp % job.setup.layout.dp)


def copied_heads(config: RunConfig, situation: Situation) -> int:
    """Return the bytes of the teachers' heads that a student's rank copies from main memory."""
    if not situation.through_host:
        return 0
    jobs = [job for job in teacher_jobs(config, situation) if job.has_head]
    return sum(job.setup.vocab_size * job.setup.size.hidden_size * job.item_bytes for job in jobs)


def output_columns(config: RunConfig, settings: Teacher, size: ModelSize, device: str) -> tuple[int | None, int]:
    """Return the columns of what a teacher hands over, None for the vocabulary's, and the bytes of a number there."""
    itemsize = compute_dtype(settings.dtype, device).itemsize
    if settings.served is not None:
        return served_layout(settings.served, size.vocab_size).handed_bytes, 1
    if settings.cache is None:
        return None if config.handoff.type == "logits" else size.hidden_size, itemsize
    manifest = read_manifest(settings.cache)
    if manifest.form == "top_k":
        return sparse_layout(manifest).handed_bytes, 1
    return manifest.hidden_size, itemsize


@dataclass(frozen=True, slots=True)
class TeacherJob:
    """The work of one rank of a teacher."""

    config: RunConfig
    settings: Teacher
    setup: ModelSetup
    device: str
    through_host: bool = False
    """Its output is in main memory."""

    @property
    def item_bytes(self) -> int:
        return compute_dtype(self.settings.dtype, self.device).itemsize

    @property
    def rows(self) -> int:
        """Number of sequences of a batch."""
        return -(-self.config.train.global_batch_size // self.setup.layout.dp)

    @property
    def width(self) -> int:
        """Number of positions of a sequence."""
        return ceil(self.setup.stretch * self.config.train.max_length)

    def window_bytes(self, student_dp: int) -> int:
        """Return the output for a microbatch of the student, concatenated where several ranks have it."""
        columns, itemsize = self.output
        positions = self.config.train.longest_at_a_time(student_dp) * self.width
        return positions * (self.setup.vocab_size if columns is None else columns) * itemsize

    @property
    def has_head(self) -> bool:
        """Whether its head is handed over."""
        return any(each.name == _HEAD for each in self.handed_over())

    @property
    def output(self) -> tuple[int | None, int]:
        """`output_columns` of this teacher."""
        return output_columns(self.config, self.settings, self.setup.size, self.device)

    def forward_bytes(self) -> int:
        """Return the activations of a layer, or at the end the hidden states and logits of a microbatch.

        A soft cap makes two more tensors of logits. Aggregations with a score form logits a block at a time.
        """
        size, t = self.setup.size, self.item_bytes
        own = self.settings.micro_batch_tokens
        dp = self.setup.layout.dp
        rows = min(self.rows, self.config.train.longest_at_a_time(dp) if own is None else -(-own // self.width))
        work = self.setup.work(self.settings, rows, self.width, self.device)
        end = work.tokens * size.hidden_size * t
        if self.config.handoff.type == "logits":
            end += self.setup.logits(work.tokens) * t * (3 if size.has_soft_cap else 1)
        context = self.settings.context
        measures_gap = context is not None and context.gap_every is not None
        if self.config.aggregation.score is not None or measures_gap:
            end += block_bytes(self.device)
        return max(working_bytes(size, work), end)

    def handed_over(self) -> tuple[Part, ...]:
        """Return the buffers of all batches in flight: this rank's rows and columns, all positions even under cp."""
        name, (columns, t) = self.settings.name, self.output
        batches = 1 if self.settings.is_student else 1 + teachers_ahead(self.config)
        positions = batches * self.rows * self.width
        phases = reading_phases(self.config)
        if columns is None:
            return (part(name, "logits handed over", positions * self.setup.columns * t, *phases),)
        if not self.settings.is_computed and t == 1:
            return (part(name, "likeliest tokens handed over", positions * columns, *phases),)
        return (
            part(name, "hidden states handed over", positions * columns * t, *phases),
            part(name, _HEAD, self.setup.columns * columns * t, *phases),
        )


def teacher_jobs(config: RunConfig, situation: Situation) -> list[TeacherJob]:
    return [
        TeacherJob(config, settings, setup, situation.machine.device, situation.through_host)
        for settings, setup in zip(config.active_teachers, situation.teachers, strict=True)
    ]


def answer_batch(config: RunConfig, settings: Teacher) -> SamplingBatch:
    """Return a teacher's largest batch of questions."""
    questions = config.evaluation
    assert questions is not None
    own = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
    return sampling_batch(config, questions.teacher_batch_size, longest_answer(config), own or config.train.max_length)


def answer_limit(config: RunConfig, settings: Teacher) -> BatchLimit:
    """Return the limits of what a rank of a teacher samples at a time."""
    return answer_batch(config, settings).limit


def _process(job: TeacherJob, working: Collection[Phase]) -> Process:
    """Return a teacher's process, which works in these phases and waits in the others."""
    if not job.settings.is_computed:
        return _process_without_model(job)
    weights = _student_weights(job, working) if job.settings.is_student else _own_weights(job, working)
    name, t, answers = job.settings.name, job.item_bytes, Phase.ANSWERS in working
    holder = job.config.student if job.settings.is_student else job.settings
    batches = [answer_batch(job.config, job.settings)] if answers else []
    device = (
        *weights.device,
        part(name, "activations", job.forward_bytes(), *_reading(working)),
        *(() if job.through_host else job.handed_over()),
        *(sampling_parts(name, Phase.ANSWERS, job.setup, holder, t, batches) if answers else ()),
    )
    return Process(device, (*weights.host, *(job.handed_over() if job.through_host else ())))


def _reading(working: Collection[Phase]) -> list[Phase]:
    return [Phase.TEACHERS] if Phase.TEACHERS in working else []


def _own_weights(job: TeacherJob, working: Collection[Phase]) -> Process:
    """Return the weights of a teacher with a separate process."""
    name, t, setup = job.settings.name, job.item_bytes, job.setup
    streams = job.settings.offload == "layers" and job.device == "cuda"
    offload = job.settings.offload is True or streams
    waiting = [phase for phase in Phase if phase not in (Phase.LOADING, *working)]
    # FSDP2 keeps embedding and head gathered until the model moves, or all of it.
    left = [] if offload else [phase for phase in reading_phases(job.config) if phase in waiting]
    stays = setup.rest if job.settings.parallelism.frees_gathered else setup.whole
    gathered = dict.fromkeys(left, t * stays) | dict.fromkeys(_reading(working), t * setup.kept(job.settings, t))
    here = setup.streamed_shard if streams else setup.shard
    device = (
        part(name, "parameters", t * here, Phase.LOADING, *working, *([] if offload else waiting)),
        Part(name, "gathered parameters", gathered if setup.is_sharded(job.settings, t) else {}),
    )
    read = part(name, "largest tensor, read from the file", t * setup.largest_tensor, Phase.LOADING)
    # On the host of a GPU the copy stays while the teacher works.
    held = waiting if job.device == "cpu" else [*waiting, *working]
    return Process(device, (read, *((part(name, "parameters", t * setup.shard, *held),) if offload else ())))


def _student_weights(job: TeacherJob, working: Collection[Phase]) -> Process:
    """Return what a teacher with the student's weights adds to the student's process.

    The student's own weights count here only where they are on the device for this teacher. An average of them is on
    the device always, or with `offload` when it is read and updated.
    """
    name, t, setup, settings = job.settings.name, job.item_bytes, job.setup, job.settings
    average = FP32 * setup.trained if settings.weights == "ema" else 0
    leaves = settings.offload is True and job.device == "cuda"
    here = (Phase.LOADING, *working, Phase.OPTIMIZER) if leaves else tuple(Phase)
    away = [phase for phase in Phase if phase is not Phase.LOADING] if leaves else []
    brought = setup.student_bytes(t) if job.config.student.offload is True else 0
    device = (
        part(name, "average", average, *here),
        part(name, "the student's parameters", brought, *working),
        part(name, "gathered parameters", t * setup.kept(job.config.student, t), *_reading(working)),
    )
    return Process(device, (part(name, "average", average, *away),))


def _process_without_model(job: TeacherJob) -> Process:
    """Return the process of a teacher that is cached or served.

    One that is cached has the head of its hidden states; one that is served is asked about a whole batch at a time.
    """
    head = sum(each.at(Phase.TEACHERS) for each in job.handed_over() if each.name == _HEAD)
    columns, itemsize = job.output
    asked = 0 if job.settings.served is None or columns is None else job.rows * job.width * columns * itemsize
    answers = part(job.settings.name, "answers", asked, Phase.TEACHERS)
    device, host = (part(job.settings.name, "head", head, *Phase), answers), (answers,)
    if job.through_host:
        return Process(device, (*host, *job.handed_over()))
    return Process((*device, *job.handed_over()), host)
