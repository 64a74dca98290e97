"""A run's models without Ray, in this process or in several processes with the environment of torchrun."""

import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

from nemo_opd.cluster.group import Group
from nemo_opd.cluster.local import LocalCluster, release, serve
from nemo_opd.cluster.placement import Placement, Processes
from nemo_opd.config.cluster import Cluster
from nemo_opd.distributed.process_group import serve_store
from nemo_opd.logging.metrics import values
from nemo_opd.preflight.corpus import Corpus
from nemo_opd.preflight.plan import Plan, preflight
from nemo_opd.training import groups
from nemo_opd.training.models import Models
from nemo_opd.training.step_metrics import KDScale
from nemo_opd.types import Batch, Metric
from nemo_opd.workers.step import PHASE, POSITIONS, StudentStep
from nemo_opd.workers.student_worker import StudentWorker
from nemo_opd.workers.teacher_worker import TeacherWorker
from tests import costs, processes
from tests.composition import DEMO, compose

TIMEOUT_S = 120.0
Argument = TypeVar("Argument")
Result = TypeVar("Result")
RTOL, WEIGHT_ATOL = 1e-4, 5e-5
"""Tolerances of curves and weights, derived in test_invariance."""


def first_batches(plan: Plan, number: int) -> list[Batch]:
    assert isinstance(plan.data, Corpus)
    with plan.data.loader(plan.config) as loader:
        return [loader.next() for _ in range(number)]


class Opened:
    """A worker with a method that calls a test's function on its rank."""

    def apply(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return function(self, *arguments)


class OpenedStudent(Opened, StudentWorker):
    last_metrics: dict[str, Metric]
    """Metrics of this rank's last step."""

    def train_step(self, step: StudentStep) -> dict[str, Metric]:
        self.last_metrics = super().train_step(step)
        return self.last_metrics


class OpenedTeacher(Opened, TeacherWorker):
    pass


def on_ranks_of(group: Group, function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Call function(worker, *arguments) on every rank of a group of `opened`."""
    return group.call("apply", [(function, *arguments)] * group.size)


@contextmanager
def opened(plan: Plan) -> Iterator[Models]:
    """Open the models of a run in the processes of this world."""
    costs.refuse("opens a run's models", "world")
    plan = in_these_processes(on_ranks(plan, Processes.started().size))
    with (
        patch.object(groups, "StudentWorker", OpenedStudent),
        patch.object(groups, "TeacherWorker", OpenedTeacher),
        LocalCluster(plan.config.cluster, device="cpu", placement=plan.placement) as cluster,
        Models(cluster, plan) as models,
    ):
        yield models


def step_metrics(
    models: Models, batch: Batch, kd_scale: float = 1.0, *, compare_gradients: bool = False
) -> dict[str, Metric]:
    """Make an optimizer step and return its metrics, except times, memory and positions, which depend on the cuts."""
    scored = models.collect(models.submit(batch, "a test"))
    with_variants = [i for i, rows in enumerate(scored.batch.teachers) if rows.variants]
    gaps = models.privilege_gaps(scored.batch, with_variants) if with_variants else {}
    metrics = {**gaps, **models.train_step(scored, kd_scale, compare_gradients=compare_gradients)}
    return {name: metric for name, metric in metrics.items() if not name.startswith((PHASE, "peak_memory", POSITIONS))}


def train_step(models: Models, batch: Batch, *, compare_gradients: bool = False) -> dict[str, float]:
    return values(step_metrics(models, batch, compare_gradients=compare_gradients))


def evaluate(models: Models, batch: Batch) -> dict[str, float]:
    return values(models.evaluate(batch))


def weights(models: Models) -> dict[str, Tensor]:
    return on_ranks_of(models.student, _weights)[0]


def _weights(student: StudentWorker) -> dict[str, Tensor]:
    state = get_model_state_dict(student.model, options=StateDictOptions(full_state_dict=True))
    return {name: value.clone() for name, value in state.items() if isinstance(value, Tensor)}


def gathered(value: Argument) -> list[Argument]:
    """Gather a value of each rank on every rank."""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, value)
    return parts


@dataclass(frozen=True)
class Training:
    """Training that a world of any size can run."""

    plan: Plan
    batches: Sequence[Batch]
    load_from: Path | None = None
    save_to: Path | None = None
    """Checkpoint written at the end."""
    export_to: Path | None = None
    compare_gradients: bool = False


@dataclass(frozen=True)
class Trained:
    curve: list[dict[str, float]]
    """Metrics of each step, with the scale of KD."""
    evaluation: dict[str, float]
    """Metrics of the first batch after training."""
    weights: dict[str, Tensor]


def train(job: Training) -> Trained:
    with opened(job.plan) as models:
        if job.load_from is not None:
            models.load(job.load_from)
        scale = KDScale(job.plan.config.loss)
        curve = []
        for batch in job.batches:
            metrics = step_metrics(models, batch, scale.value, compare_gradients=job.compare_gradients)
            curve.append(values(metrics) | {"kd_scale": scale.value})
            scale.update(metrics)
        if job.save_to is not None:
            models.save(job.save_to)
        if job.export_to is not None:
            models.export(job.export_to)
        return Trained(curve, evaluate(models, job.batches[0]), weights(models))


def plan_of(overrides: Sequence[str], config_name: str = DEMO) -> Plan:
    return preflight(compose(*overrides, config_name=config_name))


def with_micro_batch_size(plan: Plan, size: int) -> Plan:
    """Change the setting without preflight, which is slow."""
    train = plan.config.train.model_copy(update={"micro_batch_size": size})
    return replace(plan, config=plan.config.model_copy(update={"train": train}))


def in_these_processes(plan: Plan) -> Plan:
    cluster = plan.config.cluster.model_copy(update={"launcher": "local"})
    return replace(plan, config=plan.config.model_copy(update={"cluster": cluster}))


def on_ranks(plan: Plan, num_ranks: int) -> Plan:
    """Plan the same run for another number of ranks."""
    if plan.grid.student.size == num_ranks:
        return plan
    cluster = plan.config.cluster.model_copy(update={"cpu_ranks": num_ranks})
    return preflight(plan.config.model_copy(update={"cluster": cluster}))


def in_world(
    num_ranks: int, function: Callable[[Argument], Result], arguments: Sequence[Argument], folder: Path
) -> list[Result]:
    """Return function(argument) for each argument, called on rank 0 of a world like torchrun's.

    A world of one rank is this process.
    """
    if num_ranks == 1:
        return [function(argument) for argument in arguments]
    folder.mkdir(parents=True)
    store = serve_store("127.0.0.1", 60)
    # As bytes: a tensor is otherwise sent as a file descriptor, and a process can receive 256.
    pickled = pickle.dumps(list(arguments))
    processes.start(_rank, (num_ranks, store.port, function, pickled, folder), num_ranks)
    return pickle.loads((folder / "results").read_bytes())


def _rank(rank: int, num_ranks: int, port: int, function: Callable[[Any], Any], arguments: bytes, folder: Path) -> None:
    as_torchrun_starts(rank, num_ranks, port)
    if rank:
        serve(TIMEOUT_S)
    else:
        results = [function(argument) for argument in pickle.loads(arguments)]
        (folder / "results").write_bytes(pickle.dumps(results))
        release()
    # Skip the interpreter's teardown, which takes seconds.
    os._exit(0)


def as_torchrun_starts(rank: int, num_ranks: int, port: int) -> None:
    """Give this process the environment of a rank. port: port of the store on this machine."""
    torch.set_num_threads(1)
    os.environ |= {"TORCHELASTIC_RUN_ID": "test", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


class Everywhere:
    """A worker that calls functions."""

    def run(self, function: Callable[..., Result], *arguments: Any) -> Result:
        return function(*arguments)

    def close(self) -> None:
        pass


def on_all_ranks(function: Callable[..., Result], *arguments: Any) -> list[Result]:
    """Call function(*arguments) on every rank of this world, in one process group; return the ranks' results."""
    size = Processes.started().size
    placement = Placement.colocated(num_nodes=1, ranks_per_node=size, num_teachers=0)
    with (
        LocalCluster(Cluster(timeout_s=TIMEOUT_S), device="cpu", placement=placement) as cluster,
        cluster.group("test", Everywhere, {}, placement.student) as group,
    ):
        return group.call("run", [(function, *arguments)] * size)


def rank_zero(
    num_ranks: int, function: Callable[[Argument], Result], arguments: Sequence[Argument], folder: Path
) -> list[Result]:
    """Return rank 0's result of each call of `function` on all ranks, in one process group."""
    return in_world(num_ranks, partial(_everywhere, function), arguments, folder)


def _everywhere(function: Callable[[Argument], Result], argument: Argument) -> Result:
    return on_all_ranks(function, argument)[0]
