"""A step that is not finite changes nothing on any rank, and its cause is reported (methods.md §12)."""

import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from nemo_opd.cluster.batch_grid import BatchGrid
from nemo_opd.distributed.collectives import local
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import CheckpointError, NotFiniteError
from nemo_opd.logging.metrics import values
from nemo_opd.preflight.plan import Plan
from nemo_opd.training.models import Models
from nemo_opd.training.step_metrics import cause
from nemo_opd.types import Batch, Mean, Metric
from nemo_opd.workers.step import IS_TAKEN
from tests.tiny import Tiny
from tests.workers.local import (
    OpenedStudent,
    first_batches,
    in_world,
    on_ranks_of,
    opened,
    plan_of,
    step_metrics,
    train_step,
    weights,
)

pytestmark = pytest.mark.world

LORA = "student.lora={rank: 2}"
GRADIENTS = "logging.gradients_every=1"


@dataclass(frozen=True)
class Job:
    plan: Plan
    batches: Sequence[Batch]
    """Three batches; a teacher's output for the second is not finite."""
    token: int
    """Token of the first teacher that overflows in the second batch."""
    folder: Path | None = None
    """Folder of a checkpoint after the second batch, to resume from, if the run is interrupted."""
    is_bad: bool = True
    """Whether to train on the second batch."""


@dataclass(frozen=True)
class Seen:
    initial: dict[str, Any]
    after: dict[str, Any]
    """State before and after the second step."""
    finite_losses: list[bool]
    """Whether a rank's losses in the second step are finite."""
    is_taken: list[list[float]]
    """IS_TAKEN of each rank and step."""
    cause: str
    bad: dict[str, float]
    """Metrics of the second step."""
    last: dict[str, float]
    """Metrics of the third step."""
    end: dict[str, Tensor]


def learn(job: Job) -> Seen:
    compare = job.plan.config.logging.gradients_every is not None
    is_taken: list[list[float]] = []

    def step(batch: Batch) -> dict[str, Metric]:
        metrics = step_metrics(models, batch, compare_gradients=compare)
        is_taken.append(on_ranks_of(models.student, has_taken_it))
        return metrics

    with ExitStack() as stack:
        models = stack.enter_context(opened(job.plan))
        step(job.batches[0])
        initial = state(models)
        bad: dict[str, Metric] = {}
        finite = [True]
        if job.is_bad:
            on_ranks_of(models.teachers[0], make_overflow, job.token)
            bad = step(job.batches[1])
            on_ranks_of(models.teachers[0], make_sound)
            finite = on_ranks_of(models.student, has_finite_terms)
        after = state(models)
        if job.folder is not None:
            models.save(job.folder)
            stack.close()
            models = stack.enter_context(opened(job.plan))
            models.load(job.folder)
        last = step(job.batches[2])
        why = cause(job.plan.config, bad) if bad else ""
        by_rank = [list(steps) for steps in zip(*is_taken, strict=True)]
        return Seen(initial, after, finite, by_rank, why, values(bad), values(last), weights(models))


def has_taken_it(student: OpenedStudent) -> float:
    return student.last_metrics[IS_TAKEN].value()


def has_finite_terms(student: OpenedStudent) -> bool:
    metrics = student.last_metrics.items()
    terms = [metric for name, metric in metrics if name == "ce" or name.startswith("kd_part/")]
    return all(math.isfinite(term.value()) for term in terms if isinstance(term, Mean))


def make_overflow(teacher: Any, token: int) -> None:
    """Make a teacher's embedding of one token infinite."""

    def overflow(_: Any, arguments: tuple[Tensor], embedded: Tensor) -> Tensor:
        return embedded.masked_fill((arguments[0] == token).unsqueeze(-1), math.inf)

    teacher.overflow = teacher.model.get_input_embeddings().register_forward_hook(overflow)


def make_sound(teacher: Any) -> None:
    teacher.overflow.remove()


def state(models: Models) -> dict[str, Any]:
    return {**weights(models), **on_ranks_of(models.student, optimizer_state)[0]}


def optimizer_state(student: OpenedStudent) -> dict[str, Any]:
    moments = get_optimizer_state_dict(student.model, student.optimizer)["state"]
    moments_here = {
        f"{name} {key}": local(value).clone() for name, entries in moments.items() for key, value in entries.items()
    }
    return {**moments_here, "schedule": student.scheduler.state_dict()["last_epoch"]}


SETTINGS = ("train.micro_batch_size=1", "student.scheduler.warmup_steps=0", "data.packing=false")


def job_of(tiny: Tiny, *overrides: str, **more: Any) -> Job:
    plan = plan_of(tiny.overrides(*SETTINGS, *overrides))
    batches = first_batches(plan, 3)
    return Job(plan, batches, only_on_the_last_rank(batches[1]), **more)


def only_on_the_last_rank(batch: Batch) -> int:
    """Return a token of the first teacher that only rank 1 of 2 reads."""
    batch = BatchGrid(Layout(2), ()).balanced(batch)
    ids, lengths = batch.teachers[0].tokens.ids, batch.teachers[0].tokens.lengths
    half = len(ids) // 2
    first, last = (
        {int(token) for row, length in zip(ids[part], lengths[part], strict=True) for token in row[1 : length - 1]}
        for part in (slice(half), slice(half, None))
    )
    return min(last - first)


def assert_nothing_changed(seen: Seen) -> None:
    assert seen.initial.keys() == seen.after.keys()
    for name, value in seen.initial.items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(seen.after[name])), name


CASES = {
    "plain": (),
    "uld": ("loss=uld",),
    "compared gradients": (GRADIENTS,),
    "adapters": (LORA,),
    "selected": ("aggregation=select_teacher",),
    "dynamic weights": ("aggregation.weights=bits_per_byte",),
}


@pytest.fixture(scope="module")
def alone(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    folder = tmp_path_factory.mktemp("not_finite")
    jobs = {name: job_of(tiny, *overrides) for name, overrides in CASES.items()}
    plain = jobs["plain"]
    jobs["left out"] = Job(plain.plan, plain.batches, plain.token, is_bad=False)
    jobs["resumed"] = Job(plain.plan, plain.batches, plain.token, folder / "resumed")
    return dict(zip(jobs, in_world(1, learn, list(jobs.values()), folder), strict=True))


@pytest.mark.parametrize("case", CASES)
def test_nothing_changes_and_the_teacher_is_named(alone: dict[str, Seen], case: str) -> None:
    """Bug: clipping multiplies by NaN, AdamW makes every weight NaN, and the run goes on."""
    seen = alone[case]
    assert seen.is_taken == [[1.0, 0.0, 1.0]]
    assert_nothing_changed(seen)
    assert "teacher cross (nan)" in seen.cause
    assert "teacher same" not in seen.cause
    assert "CE" not in seen.cause
    assert all(value.isfinite().all() for value in seen.end.values())


def test_the_norm_alone_is_not_enough(alone: dict[str, Seen]) -> None:
    """uld sorts, so a NaN loss can have a finite gradient; the loss itself must be tested."""
    assert math.isfinite(alone["uld"].bad["grad_norm"])


def test_later_steps_are_the_same_as_without_the_batch(alone: dict[str, Seen]) -> None:
    for name, value in alone["left out"].end.items():
        assert torch.equal(value, alone["plain"].end[name]), name


def test_resuming_after_a_step_that_was_not_taken_is_the_same_to_the_last_bit(alone: dict[str, Seen]) -> None:
    for name, value in alone["resumed"].end.items():
        assert torch.equal(value, alone["plain"].end[name]), name


TOGETHER = {"data": ("loss=uld",), "tensor": ("student.parallelism.tp=2",)}


@pytest.fixture(scope="module")
def paired(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """Return results of two ranks, keyed by the kind of parallelism."""
    jobs = [job_of(tiny, *overrides, "cluster.cpu_ranks=2") for overrides in TOGETHER.values()]
    return dict(zip(TOGETHER, in_world(2, learn, jobs, tmp_path_factory.mktemp("paired") / "two"), strict=True))


@pytest.mark.parametrize("shared", TOGETHER)
def test_two_ranks_do_the_same(paired: dict[str, Seen], shared: str) -> None:
    seen = paired[shared]
    assert seen.is_taken == [[1.0, 0.0, 1.0]] * 2
    assert_nothing_changed(seen)
    assert "teacher cross (nan)" in seen.cause


def test_a_loss_of_one_rank_stops_all(paired: dict[str, Seen]) -> None:
    """Bug: a rank with finite loss and gradient takes a step that the other rank does not."""
    assert paired["data"].finite_losses == [True, False]
    assert math.isfinite(paired["data"].bad["grad_norm"])


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_state_that_is_not_finite_is_not_saved_loaded_or_exported(tiny: Tiny, tmp_path: Path, num_ranks: int) -> None:
    """Bugs: checkpoints and final/ hold NaN and the run exits 0; a rank without NaN goes on alone."""
    job = job_of(tiny, f"cluster.cpu_ranks={num_ranks}")
    (refusals,) = in_world(num_ranks, spoil, [(job, tmp_path)], tmp_path / "world")
    weight, moment, folder, half = refusals
    assert "state is not finite after its last update, so it is not saved: model.norm.weight has 1 of 16" in weight
    assert "exp_avg of model.norm.weight has 16 of 16 values that are not finite" in moment
    assert "exp_avg of model.norm.weight has 16 of 16" in folder
    assert "remove this checkpoint to use the previous one" in folder
    assert "not finite in float16, so they are not exported: model.norm.weight has 1 of 16" in half
    assert not (tmp_path / "weight").exists()
    assert not (tmp_path / "moment").exists()


def spoil(arguments: tuple[Job, Path]) -> list[str]:
    job, folder = arguments
    with opened(job.plan) as models:
        train_step(models, job.batches[0])
        return on_ranks_of(models.student, spoiled, folder)[0]


def spoiled(student: OpenedStudent, folder: Path) -> list[str]:
    """Break a weight of the last rank, then a moment, and return the errors."""
    norm = student.model.model.norm.weight
    values = local(norm).detach()
    saved = values.clone()

    is_last = dist.get_rank() == dist.get_world_size() - 1

    if is_last:
        values[3] = 1e5
    messages = [refusal(NotFiniteError, student.export, folder / "half", "float16")]
    if is_last:
        values[3] = float("nan")
    messages.insert(0, refusal(NotFiniteError, student.save, folder / "weight"))
    values.copy_(saved)

    student.save(folder / "good")
    student.optimizer.state[norm]["exp_avg"].fill_(float("inf"))
    messages.insert(1, refusal(NotFiniteError, student.save, folder / "moment"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("nemo_opd.checkpoint.state.not_finite_in", lambda *_: None)
        student.save(folder / "bad")
    messages.insert(2, refusal(CheckpointError, student.load, folder / "bad"))
    student.load(folder / "good")
    return messages


def refusal(kind: type[Exception], call: Any, *arguments: Any) -> str:
    with pytest.raises(kind) as error:
        call(*arguments)
    return str(error.value)
