"""The student and its teachers as the driver sees them."""

import shutil
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nemo_opd.aggregation import build_parts, coverage_metrics, joined, share_metrics, share_out, weighted_by_confidence
from nemo_opd.checkpoint.verify import require_whole_export
from nemo_opd.cluster.base import Call, Cluster, Group
from nemo_opd.config.on_policy import confidence_alphas
from nemo_opd.disk import storage_errors
from nemo_opd.distributed.layout import Layout
from nemo_opd.files import sync
from nemo_opd.handoff.shared_memory import FileDescriptor
from nemo_opd.handoff.window import Window, windows
from nemo_opd.rollout.base import Completion, Request, Sampling
from nemo_opd.training.batch_grid import leads, reduced, shared_out
from nemo_opd.training.links import Links
from nemo_opd.training.plan import Plan
from nemo_opd.training.prompts import Prompts
from nemo_opd.types import Batch, Mean, Metric, SequenceScores
from nemo_opd.workers.student import StudentStep, StudentWorker
from nemo_opd.workers.teacher import TeacherOutput, TeacherWorker

RankWindows = tuple[Window, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """A global batch that the teachers are reading."""

    batch: Batch
    slot: int
    """Which of the teachers' buffers it is written into."""
    calls: list[Call]
    """Per teacher."""
    about: str
    """Which batch it is, for messages."""


@dataclass(frozen=True, slots=True)
class Taught:
    """A global batch after its teachers have read it."""

    batch: Batch
    """With what each teacher's word counts for in each sequence."""
    slot: int
    windows: list[RankWindows]
    """By rank of the student: on what each teacher makes of its rows."""
    seconds: tuple[float, ...]
    """What each teacher took, on its slowest rank."""
    about: str


class Models:
    """Worker groups of the student and of every active teacher, each in its own layout.

    What teachers compute stays where it is; only handles and metrics come here. The teachers have a set of buffers for
    the batch that the student reads and one for each batch that they are ahead.
    """

    def __init__(self, cluster: Cluster, plan: Plan) -> None:
        """Returns when all models are loaded. Raises WorkerError or ClusterError."""
        self._cluster = cluster
        self._grid = plan.grid
        self._deliveries = plan.deliveries
        self._aggregation, self._names = plan.config.aggregation, plan.config.active_names
        self._priors = [teacher.weight for teacher in plan.config.active_teachers]
        self._parts = build_parts(
            plan.config,
            [teacher.projection for teacher in plan.teachers],
            student_vocab_size=plan.student.vocab_size,
            teacher_vocab_sizes=[teacher.vocab_size for teacher in plan.teachers],
        )
        self._alphas = confidence_alphas(plan.config)
        self._free_slots = deque(range(1 + plan.lookahead))
        with ExitStack() as stack:
            # Closed in reverse: the student drops its mappings before the teachers free their buffers.
            self.teachers = [stack.enter_context(group) for group in teacher_groups(cluster, plan)]
            self.student = stack.enter_context(student_group(cluster, plan))
            cluster.gather([group.ready for group in (self.student, *self.teachers)])
            self._links = Links(self.student, self.teachers, plan.deliveries)
            self._stack = stack.pop_all()

    def ask(self, batch: Batch, about: str) -> Asked:
        """Start every teacher's forward pass, side by side; returns at once. about: which batch it is, for messages."""
        slot = self._free_slots.popleft()
        return Asked(batch, slot, self._on_teachers("forward", batch, slot, about=about), about)

    def _on_teachers(self, method: str, batch: Batch, *more: object, about: str = "") -> list[Call]:
        """Call every teacher with the tokens of each of its ranks."""
        calls = []
        for i, (group, layout) in enumerate(zip(self.teachers, self._grid.teachers, strict=True)):
            own = [part.teachers[i].tokens for part in self._grid.by_rank(batch, layout)]
            calls.append(group.submit(method, [(tokens, *more) for tokens in own], about=about))
        return calls

    def answer(self, asked: Asked) -> Taught:
        """Wait for the teachers, and settle who has how much of a say in what."""
        by_teacher: list[list[TeacherOutput]] = self._cluster.gather(asked.calls)
        scores = self._scores(by_teacher, asked.batch)
        given = [each for each in scores if each is not None]
        batch = share_out(self._aggregation, asked.batch, given, priors=self._priors)
        batch = weighted_by_confidence(batch, scores, self._alphas)
        by_teacher_and_reader = [
            windows([scored.handle for scored in by_rank], delivery.sides)
            for by_rank, delivery in zip(by_teacher, self._deliveries, strict=True)
        ]
        self._links.bring(by_teacher_and_reader, asked.about)
        seconds = tuple(max(scored.seconds for scored in by_rank) for by_rank in by_teacher)
        return Taught(batch, asked.slot, self._by_student_rank(by_teacher_and_reader), seconds, asked.about)

    def _by_student_rank(self, by_teacher: Sequence[Sequence[Window]]) -> list[RankWindows]:
        return [tuple(by_rank[rank] for by_rank in by_teacher) for rank in range(self._grid.student.size)]

    def _scores(self, by_teacher: Sequence[Sequence[TeacherOutput]], batch: Batch) -> list[SequenceScores | None]:
        """Of each teacher for the rows of the batch; None for one that was not asked."""
        scores: list[SequenceScores | None] = []
        for by_rank, layout in zip(by_teacher, self._grid.teachers, strict=True):
            given = [each for each in (by_rank[rank].scores for rank in leads(layout)) if each is not None]
            scores.append(joined(given, len(batch)) if given else None)
        return scores

    def train_step(self, taught: Taught, kd_scale: float, *, compare_gradients: bool = False) -> dict[str, Metric]:
        """The student's optimizer step: the metrics of the global batch."""
        normalizers = self._parts.normalizers(taught.batch)
        steps = [
            (StudentStep(part, own, normalizers, kd_scale, compare_gradients),)
            for part, own in self._student_parts(taught)
        ]
        return self._on_student("train_step", steps, taught)

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        """The metrics of a global batch, without an update; also while the teachers are ahead."""
        taught = self.answer(self.ask(batch, "validation"))
        return self._on_student("evaluate", self._student_parts(taught), taught)

    def _student_parts(self, taught: Taught) -> list[tuple[Batch, RankWindows]]:
        return list(zip(self._grid.by_rank(taught.batch, self._grid.student), taught.windows, strict=True))

    def _on_student(self, method: str, arguments: Sequence[tuple[Any, ...]], taught: Taught) -> dict[str, Metric]:
        """Have the student read what the teachers wrote, whose buffers are free afterwards."""
        metrics = reduced(self.student.call(method, arguments, about=taught.about), self._grid.student)
        self._free_slots.append(taught.slot)
        shared = share_metrics(self._parts, taught.batch)
        return metrics | shared | coverage_metrics(self._parts, taught.batch, self._names)

    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int) -> list[Completion]:
        """A continuation of each prompt by the student, in order; each data-parallel index samples its own part."""
        about = f"rollouts of step {version + 1}"
        return continued(self.student, self._grid.student, requests, sampling, version, about=about)

    def generate_by_teacher(
        self, i: int, requests: Sequence[Request], sampling: Sampling, end_ids: Collection[int], batch_size: int
    ) -> list[Completion]:
        """The same by an active teacher, of prompts in its own tokens; batch_size: sequences a rank takes at a time."""
        group, layout = self.teachers[i], self._grid.teachers[i]
        return continued(group, layout, requests, sampling, end_ids, batch_size, about="questions")

    def teachers_bits_per_byte(self, batch: Batch) -> list[Mean]:
        totals = []
        by_teacher = self._cluster.gather(self._on_teachers("bits_per_byte", batch))
        for by_rank, layout in zip(by_teacher, self._grid.teachers, strict=True):
            total = Mean(0.0, 0.0)
            for rank in leads(layout):
                total = total.merge(by_rank[rank])
            totals.append(total)
        return totals

    def save(self, folder: Path) -> None:
        self._write_or_read("save", folder)

    def load(self, folder: Path) -> None:
        self._write_or_read("load", folder)

    def export(self, folder: Path, served_as: str | None = None) -> None:
        """served_as: the dtype's name of a server that is to load it; by default it is for users."""
        self._write_or_read("export", folder, served_as)

    def _write_or_read(self, method: str, folder: Path, *more: object) -> None:
        self.student.call(method, [(folder.resolve(), *more)] * self._grid.student.size)

    @contextmanager
    def held_weights(self, served_as: str) -> Iterator[FileDescriptor]:
        """Inside, the student's first process holds in memory what a server would load from an exported folder."""
        by_rank = self.student.call("hold_weights", [(served_as,)] * self._grid.student.size)
        try:
            yield by_rank[0]
        finally:
            self.student.call("release_weights")

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def continued(group: Group, layout: Layout, requests: Sequence[Request], *more: object, about: str) -> list[Completion]:
    """What the ranks of a group make of their parts of the requests, in order. `more` is told to each rank."""
    arguments = [(part, *more) for part in shared_out(requests, layout)]
    by_rank: list[list[Completion]] = group.call("generate", arguments, about=about)
    return [completion for rank in leads(layout) for completion in by_rank[rank]]


def export_whole(models: Models, folder: Path, served_as: str | None = None) -> None:
    """Write the student's Hugging Face folder, whole or not at all; an older one is replaced. As `Models.export`."""
    temporary = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        models.export(temporary, served_as)
        require_whole_export(temporary)
        with storage_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def teacher_groups(cluster: Cluster, plan: Plan) -> Iterator[Group]:
    """Start a group for each active teacher."""
    alphas = confidence_alphas(plan.config)
    for i, settings in enumerate(plan.config.active_teachers):
        yield cluster.group(
            f"teacher {settings.name}",
            TeacherWorker,
            {
                "settings": settings,
                "key": f"teachers.{i}.model",
                "vocab_size": plan.teachers[i].vocab_size,
                "micro_batch_size": plan.config.train.micro_batch_size,
                "device": plan.device,
                "transport": plan.transport,
                "handoff": plan.config.handoff.type,
                "score": plan.config.aggregation.score if alphas[i] is None else "log_probability",
                "readers": plan.deliveries[i].readers,
                "num_slots": 1 + plan.lookahead,
                "gives_back": not plan.placement.is_separate,
                "shares_process": plan.config.cluster.launcher == "local",
            },
            plan.placement.teachers[i],
        )


def student_group(cluster: Cluster, plan: Plan) -> Group:
    return cluster.group(
        "student",
        StudentWorker,
        {
            "config": plan.config,
            "projections": [teacher.projection for teacher in plan.teachers],
            "total_steps": plan.total_steps,
            "vocab_size": plan.student.vocab_size,
            "teacher_vocab_sizes": [teacher.vocab_size for teacher in plan.teachers],
            "device": plan.device,
            "transport": plan.transport,
            "end_ids": plan.data.end_ids if isinstance(plan.data, Prompts) else (),
        },
        plan.placement.student,
    )
