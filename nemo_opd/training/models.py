"""The student and its teachers as the driver sees them."""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from nemo_opd.aggregation import build_parts, joined, share_metrics, share_out
from nemo_opd.cluster.virtual_cluster import VirtualCluster
from nemo_opd.cluster.worker_group import WorkerGroup
from nemo_opd.data.collate import pad_rows, shards
from nemo_opd.logging.metrics import Timer, merge
from nemo_opd.training.plan import Plan
from nemo_opd.types import Batch, Mean, Metric
from nemo_opd.workers.student import StudentStep, StudentWorker
from nemo_opd.workers.teacher import OutputHandle, Scored, TeacherWorker

RankHandles = tuple[OutputHandle, ...]


@dataclass(frozen=True, slots=True)
class Taught:
    """A global batch after its teachers have read it."""

    batch: Batch
    """With what each teacher's word counts for in each sequence."""
    handles: list[RankHandles]
    """By rank: to every teacher's output."""


def split(batch: Batch, num_ranks: int, micro_batch_size: int) -> list[Batch]:
    """The batch's rows by rank; empty rows are added so that every rank has the same number of microbatches."""
    unit = num_ranks * micro_batch_size
    return shards(pad_rows(batch, -(-len(batch) // unit) * unit), num_ranks)


class Models:
    """Worker groups of the student and of every active teacher, on the same ranks.

    What teachers compute stays where it is; only handles and metrics come here.
    """

    def __init__(self, cluster: VirtualCluster, plan: Plan) -> None:
        """Returns when all models are loaded. Raises WorkerError or ClusterError."""
        self._num_ranks = plan.num_ranks
        self._aggregation = plan.config.aggregation
        self._priors = [teacher.weight for teacher in plan.config.active_teachers]
        self._parts = build_parts(
            plan.config,
            [teacher.projection for teacher in plan.teachers],
            student_vocab_size=plan.student.vocab_size,
            teacher_vocab_sizes=[teacher.vocab_size for teacher in plan.teachers],
        )
        self._micro_batch_size = plan.config.train.micro_batch_size
        with ExitStack() as stack:
            # Closed in reverse: the student drops its mappings before the teachers free their buffers.
            self.teachers = [stack.enter_context(group) for group in teacher_groups(cluster, plan)]
            self.student = stack.enter_context(student_group(cluster, plan))
            self.student.gather([group.ready for group in (self.student, *self.teachers)])
            self._stack = stack.pop_all()

    def _split(self, batch: Batch) -> list[Batch]:
        return split(batch, self._num_ranks, self._micro_batch_size)

    def teach(self, batch: Batch) -> Taught:
        """Every teacher's forward pass, side by side, and who has how much of a say in what."""
        parts = self._split(batch)
        calls = [
            group.submit("forward", [(part.teachers[i].tokens,) for part in parts])
            for i, group in enumerate(self.teachers)
        ]
        by_teacher: list[list[Scored]] = self.student.gather(calls)
        scores = [
            joined([scored.scores for scored in by_rank if scored.scores is not None], len(batch))
            for by_rank in by_teacher
            if by_rank[0].scores is not None
        ]
        handles = [tuple(by_rank[rank].handle for by_rank in by_teacher) for rank in range(self._num_ranks)]
        return Taught(share_out(self._aggregation, batch, scores, priors=self._priors), handles)

    def train_step(
        self, batch: Batch, kd_scale: float, timer: Timer, *, compare_gradients: bool = False
    ) -> dict[str, Metric]:
        """Teachers, then the student's optimizer step: the metrics of the global batch."""
        with timer.span("teacher_s"):
            taught = self.teach(batch)
        with timer.span("student_s"):
            normalizers = self._parts.normalizers(taught.batch)
            pairs = zip(self._split(taught.batch), taught.handles, strict=True)
            steps = [(StudentStep(part, own, normalizers, kd_scale, compare_gradients),) for part, own in pairs]
            metrics = merge(self.student.call("train_step", steps))
        return metrics | share_metrics(self._parts, taught.batch)

    def evaluate(self, batch: Batch) -> dict[str, Metric]:
        taught = self.teach(batch)
        pairs = zip(self._split(taught.batch), taught.handles, strict=True)
        return merge(self.student.call("evaluate", list(pairs))) | share_metrics(self._parts, taught.batch)

    def teachers_bits_per_byte(self, batch: Batch) -> list[Mean]:
        parts = self._split(batch)
        calls = [
            group.submit("bits_per_byte", [(part.teachers[i].tokens,) for part in parts])
            for i, group in enumerate(self.teachers)
        ]
        totals = []
        for by_rank in self.student.gather(calls):
            total = Mean(0.0, 0.0)
            for part in by_rank:
                total = total.merge(part)
            totals.append(total)
        return totals

    def save(self, folder: Path) -> None:
        self._on_student("save", folder)

    def load(self, folder: Path) -> None:
        self._on_student("load", folder)

    def export(self, folder: Path) -> None:
        self._on_student("export", folder)

    def _on_student(self, method: str, folder: Path) -> None:
        self.student.call(method, [(folder.resolve(),)] * self._num_ranks)

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def teacher_groups(cluster: VirtualCluster, plan: Plan) -> list[WorkerGroup]:
    return [
        WorkerGroup(
            cluster,
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
                "score": plan.config.aggregation.score,
            },
        )
        for i, settings in enumerate(plan.config.active_teachers)
    ]


def student_group(cluster: VirtualCluster, plan: Plan) -> WorkerGroup:
    return WorkerGroup(
        cluster,
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
        },
    )
