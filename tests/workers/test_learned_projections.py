"""Projections that are learned in a run: equal on all layouts, resumed to the last bit, exported as matrices.

Tolerances as derived in tests/workers/test_invariance.py; Δ also has the learning rate 1e-2.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_opd.errors import ConfigError, ProjectionError, WorkerError
from nemo_opd.losses.learned_projection import learnable_rows
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.workers.student_model import PROJECTIONS
from nemo_opd.workers.student_worker import StudentWorker
from tests.composition import compose
from tests.tiny import Tiny
from tests.workers.local import (
    RTOL,
    WEIGHT_ATOL,
    Training,
    evaluate,
    first_batches,
    in_world,
    on_ranks_of,
    opened,
    plan_of,
    step_metrics,
    train_step,
)

pytestmark = pytest.mark.world

STEPS = 4
MOVED = "projection_moved/cross"


@dataclass(frozen=True)
class Learned:
    curve: list[dict[str, float]]
    deltas: list[Tensor]
    """Δ of each rank at the end."""
    validation: dict[str, float]


def job(tiny: Tiny, *options: str, **more: Path) -> Training:
    plan = plan_of(
        [
            *tiny.overrides(teachers=1),
            "+teachers.0.projection_lr=0.05",
            "student.optimizer.lr=1e-2",
            "student.optimizer.eps=1e-3",
            "student.scheduler.warmup_steps=0",
            f"train.max_steps={STEPS}",
            *options,
        ]
    )
    return Training(plan, first_batches(plan, STEPS), **more)


def learn(run: Training) -> Learned:
    with opened(run.plan) as models:
        if run.load_from is not None:
            models.load(run.load_from)
        curve = [train_step(models, batch, compare_gradients=run.compare_gradients) for batch in run.batches]
        if run.save_to is not None:
            models.save(run.save_to)
        if run.export_to is not None:
            models.export(run.export_to)
        return Learned(curve, on_ranks_of(models.student, delta), evaluate(models, run.batches[0]))


def delta(student: StudentWorker) -> Tensor:
    (learned,) = student.learned.by_teacher.values()
    return learned.delta.detach().clone()


def kd_of(learned: Learned) -> list[float]:
    return [record["kd/cross"] for record in learned.curve]


def learn_all(runs: Sequence[Training]) -> list[Learned]:
    return [learn(run) for run in runs]


def with_learnable_pairs(matrix: ProjectionMatrix) -> ProjectionMatrix:
    """Replace the first tokens of rows of several entries, which are all in exact pairs, by tokens without a pair."""
    rows = learnable_rows(matrix)
    free = np.setdiff1d(np.arange(matrix.teacher_vocab_size), matrix.shared_pairs[:, 1])[: len(rows)]
    indices = matrix.indices.copy()
    indices[rows[: len(free)], 0] = free
    return ProjectionMatrix(
        **{field.name: getattr(matrix, field.name) for field in fields(matrix)} | {"indices": indices}
    )


@pytest.fixture(scope="module", params=["p_kl", "h_kl"])
def loss(tiny: Tiny, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    options = [f"loss={request.param}"]
    if request.param == "h_kl":
        matrix, file = job(tiny).plan.teachers[0].projection, tmp_path_factory.mktemp("matrix") / "pairs.safetensors"
        assert matrix is not None
        with_learnable_pairs(matrix).save(file)
        options.append(f"teachers.0.projection={file}")
    return options


@pytest.fixture(scope="module")
def exported(loss: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learned") / "final"


@pytest.fixture(scope="module")
def learned(tiny: Tiny, loss: list[str], exported: Path) -> Learned:
    return learn(job(tiny, *loss, export_to=exported))


LAYOUTS = {
    "data parallel": ["cluster.cpu_ranks=2"],
    "tensor parallel": ["cluster.cpu_ranks=2", "student.parallelism.tp=2", "teachers.0.parallelism.tp=2"],
}


@pytest.fixture(scope="module")
def laid_out(tiny: Tiny, loss: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Learned]:
    jobs = [job(tiny, *loss, *options) for options in LAYOUTS.values()]
    (results,) = in_world(2, learn_all, [jobs], tmp_path_factory.mktemp("layouts") / "two")
    return dict(zip(LAYOUTS, results, strict=True))


def test_the_projection_moves_and_the_divergence_falls_faster(tiny: Tiny, loss: list[str], learned: Learned) -> None:
    """Bug: Δ gets no update, or an update against the gradient."""
    fixed = learn(job(tiny, *loss, "teachers.0.projection_lr=1e-12"))
    assert kd_of(learned)[0] == kd_of(fixed)[0]
    assert kd_of(learned)[-1] < kd_of(fixed)[-1] - 5e-5
    moved = [record[MOVED] for record in learned.curve]
    assert moved == sorted(moved)
    assert moved[-1] > 1e-3


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_learn_the_same(learned: Learned, laid_out: dict[str, Learned], layout: str) -> None:
    """Bugs: a rank's gradient is lost or counted twice; the ranks' projections drift apart."""
    two_ranks = laid_out[layout]
    first, *other_deltas = two_ranks.deltas
    assert all(torch.equal(first, delta) for delta in other_deltas)
    torch.testing.assert_close(first, learned.deltas[0], rtol=0, atol=WEIGHT_ATOL * 5)
    assert kd_of(two_ranks) == pytest.approx(kd_of(learned), rel=RTOL)
    assert two_ranks.validation["kd/cross"] == pytest.approx(learned.validation["kd/cross"], rel=RTOL)


def test_microbatches_and_compared_gradients_learn_the_same(tiny: Tiny, loss: list[str], learned: Learned) -> None:
    """Bugs: the gradient is the last microbatch's only; CE's backward pass clears it."""
    cut = learn(job(tiny, *loss, "train.micro_batch_size=1", compare_gradients=True))
    torch.testing.assert_close(cut.deltas[0], learned.deltas[0], rtol=0, atol=WEIGHT_ATOL * 5)


def test_resumed_training_is_the_same_to_the_last_bit(
    tiny: Tiny, loss: list[str], learned: Learned, tmp_path: Path
) -> None:
    """Bugs: moments or Δ start again; the learning rate is another step's."""
    full_run = job(tiny, *loss)
    learn(Training(full_run.plan, full_run.batches[:2], save_to=tmp_path / "step"))
    second = learn(Training(full_run.plan, full_run.batches[2:], load_from=tmp_path / "step"))
    assert second.curve == learned.curve[2:]
    assert torch.equal(second.deltas[0], learned.deltas[0])
    state = tmp_path / "step" / "state" / "projections.pt"
    state.write_bytes(state.read_bytes()[:100])
    with pytest.raises(WorkerError, match="it is damaged or belongs to other teachers"):
        learn(Training(full_run.plan, [], load_from=tmp_path / "step"))


def test_the_exported_projection_is_the_validated_one(
    tiny: Tiny, loss: list[str], learned: Learned, exported: Path
) -> None:
    """Bugs: the export is the initial projection or another step's; validation reads the fixed matrix."""
    matrix = ProjectionMatrix.load(exported / PROJECTIONS / "cross.safetensors")
    run = job(tiny, *loss)
    start = run.plan.teachers[0].projection
    assert start is not None
    np.testing.assert_array_equal(matrix.indices, start.indices)
    assert np.abs(matrix.weights - start.weights).max() > 5e-3
    after = learn(
        job(
            tiny,
            *loss,
            f"student.model={exported}",
            f"teachers.0.projection={exported / PROJECTIONS}/cross.safetensors",
        )
    )
    assert after.curve[0]["kd/cross"] == pytest.approx(learned.validation["kd/cross"], rel=RTOL)


def test_a_step_that_is_not_finite_leaves_the_projection(tiny: Tiny) -> None:
    run = job(tiny)
    with opened(run.plan) as models:
        train_step(models, run.batches[0])
        (initial,) = on_ranks_of(models.student, delta)
        assert step_metrics(models, run.batches[1], float("nan"))["is_taken"].value() == 0
        assert torch.equal(on_ranks_of(models.student, delta)[0], initial)


def test_a_loss_that_does_not_read_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"teachers\.0\.projection_lr=0\.05: loss\.type=gold does not depend"):
        compose("teachers=demo_single", "loss=gold", "+teachers.0.projection_lr=0.05")


def test_a_projection_without_learnable_rows_is_refused(tiny: Tiny) -> None:
    with pytest.raises(
        ProjectionError, match=r"teachers\.0\.projection_lr=0\.05: no row .*teachers\.0\.loss\.type=p_kl"
    ):
        job(tiny, "loss=h_kl")
