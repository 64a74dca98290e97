"""A run's workers without Ray: every rank holds the student and all teachers, as plain objects in one gloo world."""

import os
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from nemo_opd.aggregation import coverage_metrics, joined, share_metrics, share_out, weighted_by_confidence
from nemo_opd.config.on_policy import confidence_alphas
from nemo_opd.data.loader import TrainLoader
from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.window import OutputHandle, Window, windows
from nemo_opd.logging.metrics import values
from nemo_opd.training.batch_grid import leads, reduced
from nemo_opd.training.objective import KDScale
from nemo_opd.training.plan import Plan
from nemo_opd.training.preflight import preflight
from nemo_opd.types import Batch, Metric
from nemo_opd.workers.phases import PREFIX
from nemo_opd.workers.student import StudentStep, StudentWorker
from nemo_opd.workers.teacher import Scored, TeacherWorker
from tests import processes
from tests.composition import DEMO, compose

Given = TypeVar("Given")
Made = TypeVar("Made")
RTOL, WEIGHT_ATOL = 1e-4, 5e-5
"""Of curves and weights; derived in test_invariance."""


def first_batches(plan: Plan, number: int) -> list[Batch]:
    config = plan.config
    with TrainLoader(
        plan.data.train,
        plan.data.make_sample,
        config.train.global_batch_size,
        config.run.seed,
        config.data.shuffle,
        num_workers=0,
    ) as loader:
        return [loader.next() for _ in range(number)]


class LocalModels:
    """This rank's workers, driven as nemo_opd.training.models.Models drives all ranks'."""

    def __init__(self, plan: Plan) -> None:
        plan = on_ranks(plan, dist.get_world_size())
        config = plan.config
        self.aggregation = config.aggregation
        self.priors = [teacher.weight for teacher in config.active_teachers]
        self.alphas = confidence_alphas(config)
        self.micro_batch_size = config.train.micro_batch_size
        self.teachers = [
            TeacherWorker(
                settings,
                key=f"teachers.{i}.model",
                vocab_size=plan.teachers[i].vocab_size,
                micro_batch_size=self.micro_batch_size,
                device="cpu",
                transport="shared_memory",
                handoff=config.handoff.type,
                score=config.aggregation.score if self.alphas[i] is None else "log_probability",
                readers=plan.deliveries[i].readers,
            )
            for i, settings in enumerate(config.active_teachers)
        ]
        self.grid, self.deliveries = plan.grid, plan.deliveries
        self.student = StudentWorker(
            config,
            projections=[teacher.projection for teacher in plan.teachers],
            total_steps=plan.total_steps,
            vocab_size=plan.student.vocab_size,
            teacher_vocab_sizes=[teacher.vocab_size for teacher in plan.teachers],
            device="cpu",
            transport="shared_memory",
        )

    def own(self, batch: Batch, layout: Layout | None = None) -> Batch:
        """This rank's rows, by default as of the student."""
        layout = self.grid.student if layout is None else layout
        return self.grid.by_rank(batch, layout)[dist.get_rank()]

    def train_step(self, batch: Batch, kd_scale: float = 1.0, *, compare_gradients: bool = False) -> dict[str, float]:
        return values(self.step_metrics(batch, kd_scale, compare_gradients=compare_gradients))

    def step_metrics(self, batch: Batch, kd_scale: float, *, compare_gradients: bool) -> dict[str, Metric]:
        taught, windows = self.teach(batch)
        normalizers = self.student.parts.normalizers(taught)
        step = StudentStep(self.own(taught), windows, normalizers, kd_scale, compare_gradients)
        return self.reduced(self.student.train_step(step)) | self.shared(taught)

    def evaluate(self, batch: Batch) -> dict[str, float]:
        taught, windows = self.teach(batch)
        own = self.reduced(self.student.evaluate(self.own(taught), windows))
        return values(own | self.shared(taught))

    def shared(self, taught: Batch) -> dict[str, Metric]:
        """What the driver says of a global batch."""
        parts = self.student.parts
        return share_metrics(parts, taught) | coverage_metrics(parts, taught, self.student.config.active_names)

    def reduced(self, own: dict[str, Metric]) -> dict[str, Metric]:
        """Metrics of all ranks as one, on every rank; times are no result of training."""
        every = reduced(gathered(own), self.grid.student)
        return {name: metric for name, metric in every.items() if not name.startswith(PREFIX)}

    def teach(self, batch: Batch) -> tuple[Batch, tuple[Window, ...]]:
        by_teacher = [gathered(each) for each in self.scored(batch)]
        scores = [
            None if by_rank[0].scores is None else joined([by_rank[rank].scores for rank in leads(layout)], len(batch))
            for by_rank, layout in zip(by_teacher, self.grid.teachers, strict=True)
        ]
        own_windows = tuple(
            windows([each.handle for each in by_rank], delivery.sides)[dist.get_rank()]
            for by_rank, delivery in zip(by_teacher, self.deliveries, strict=True)
        )
        given = [each for each in scores if each is not None]
        shared = share_out(self.aggregation, batch, given, priors=self.priors)
        return weighted_by_confidence(shared, scores, self.alphas), own_windows

    def score(self, batch: Batch) -> tuple[OutputHandle, ...]:
        return tuple(each.handle for each in self.scored(batch))

    def scored(self, batch: Batch) -> list[Scored]:
        """By this rank of each teacher."""
        return [
            teacher.forward(self.own(batch, layout).teachers[i].tokens)
            for i, (teacher, layout) in enumerate(zip(self.teachers, self.grid.teachers, strict=True))
        ]

    def weights(self) -> dict[str, Tensor]:
        state = get_model_state_dict(self.student.model, options=StateDictOptions(full_state_dict=True))
        return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}

    def close(self) -> None:
        self.student.close()
        for teacher in self.teachers:
            teacher.close()


def gathered(own: Given) -> list[Given]:
    """Everybody's, by rank, on every rank."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, own)
    return parts


@dataclass(frozen=True)
class Training:
    """A piece of work that a world of any size can do."""

    plan: Plan
    batches: Sequence[Batch]
    load_from: Path | None = None
    save_to: Path | None = None
    """Written at the end."""
    export_to: Path | None = None
    compare_gradients: bool = False


@dataclass(frozen=True)
class Trained:
    curve: list[dict[str, float]]
    """With the scale of KD in each step."""
    evaluation: dict[str, float]
    """Of the first batch, after training."""
    weights: dict[str, Tensor]


def train(job: Training) -> Trained:
    models = LocalModels(job.plan)
    if job.load_from is not None:
        models.student.load(job.load_from)
    scale = KDScale(job.plan.config.loss)
    curve = []
    for batch in job.batches:
        metrics = models.step_metrics(batch, scale.value, compare_gradients=job.compare_gradients)
        curve.append(values(metrics) | {"kd_scale": scale.value})
        scale.update(metrics)
    if job.save_to is not None:
        models.student.save(job.save_to)
    if job.export_to is not None:
        models.student.export(job.export_to)
    result = Trained(curve, models.evaluate(job.batches[0]), models.weights())
    models.close()
    return result


def plan_of(overrides: Sequence[str], config_name: str = DEMO) -> Plan:
    return preflight(compose(*overrides, config_name=config_name))


def on_ranks(plan: Plan, num_ranks: int) -> Plan:
    """The same run on another number of ranks."""
    if plan.grid.student.size == num_ranks:
        return plan
    cluster = plan.config.cluster.model_copy(update={"cpu_ranks": num_ranks})
    return preflight(plan.config.model_copy(update={"cluster": cluster}))


def in_world(num_ranks: int, function: Callable[[Given], Made], arguments: Sequence[Given], folder: Path) -> list[Made]:
    """function(argument) for each argument in a gloo world: rank 0's results. One rank is this process itself."""
    if num_ranks == 1:
        join(dist.HashStore(), 0, 1)
        try:
            return [function(argument) for argument in arguments]
        finally:
            dist.destroy_process_group()
    folder.mkdir(parents=True)
    processes.start(_rank, (num_ranks, function, arguments, folder), num_ranks)
    return pickle.loads((folder / "results").read_bytes())


def _rank(rank: int, num_ranks: int, function: Callable[[Any], Any], arguments: Sequence[Any], folder: Path) -> None:
    torch.set_num_threads(1)
    join(dist.FileStore(str(folder / "store"), num_ranks), rank, num_ranks)
    results = [function(argument) for argument in arguments]
    if rank == 0:
        (folder / "results").write_bytes(pickle.dumps(results))
    dist.barrier()
    dist.destroy_process_group()
    # Past the interpreter's own teardown, which takes seconds with everything that was imported.
    os._exit(0)


def join(store: dist.Store, rank: int, num_ranks: int) -> None:
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=timedelta(seconds=120))
