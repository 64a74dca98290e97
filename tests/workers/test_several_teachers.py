"""Several teachers in the workers: methods.md §6 for all cuts of a batch, in training and validation.

A learning rate of 1e-12 leaves the student unchanged, so validation after the step has the same logits.
Tolerance as in test_invariance; a wrong gradient shows in its norm.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from nemo_opd.preflight.plan import Plan
from nemo_opd.training.step_metrics import objective_values
from nemo_opd.types import Batch, Last
from tests.reference import trainer
from tests.tiny import SENTENCES, Tiny
from tests.workers.local import (
    RTOL,
    WEIGHT_ATOL,
    Trained,
    Training,
    first_batches,
    in_world,
    plan_of,
    train,
    with_micro_batch_size,
)
from tests.workers.plain_trainer import load, plain_run, rows_of_batch

pytestmark = pytest.mark.world

TEACHERS = ("cross", "same")
ROUTES = [0, 1, 1, 0, 1, 0, 1, 1]
REVERSED = ["teachers.1.loss.type=same_vocab", "teachers.1.loss.divergence=reverse_kl"]
SCALED = ["aggregation.vocabulary_scaling=true", "teachers.0.weight=0.7", "teachers.1.weight=0.2"]
MODES = {
    "static": [*SCALED, *REVERSED],
    "bits_per_byte": ["aggregation.weights=bits_per_byte", "aggregation.alpha=0.5", *SCALED],
    "entropy": ["aggregation.weights=entropy"],
    "max_probability": ["aggregation.weights=max_probability", "aggregation.alpha=30"],
    "sequence": ["aggregation=select_teacher", *REVERSED],
    "batch": ["aggregation=select_teacher", "aggregation.per=batch"],
    "routed": ["aggregation=routed", "aggregation.key=from", "loss.normalizer=units"],
}
GRIDS = ((1, 4), (2, 1))
"""Numbers of ranks and microbatch sizes."""
LEARNS = ["student.optimizer.lr=1e-2", "student.optimizer.eps=1e-3", "train.gradient_clip=null"]


def make_plan(tiny: Tiny, documents: Path, micro_batch_size: int, *more: str) -> Plan:
    return plan_of(
        [
            *tiny.overrides(),
            "data.train.arrow_files=null",
            f"data.train.jsonl_files={documents}",
            "data.shuffle=false",
            "data.packing=false",
            "data.validation.arrow_files=null",
            "train.global_batch_size=8",
            f"train.micro_batch_size={micro_batch_size}",
            "student.optimizer.lr=1e-12",
            "student.scheduler.warmup_steps=0",
            "loss.kd_weight=0.7",
            "loss.ce_weight=0.4",
            *more,
        ]
    )


@dataclass(frozen=True)
class Case:
    plan: Plan
    point: dict[str, float]
    """Values of the reference."""
    says: list[float]
    """Mean weight in a sequence, or share of the sequences, of each teacher."""
    objectives: tuple[Tensor, Tensor]
    """Weighted gradients of KD and CE."""
    by_grid: dict[tuple[int, int], Trained]


@dataclass(frozen=True)
class Runs:
    cases: dict[str, Case]
    compared: dict[int, Trained]
    """Results with static weights, compared gradients and a larger learning rate, keyed by the number of ranks."""
    plain: Trained
    """Result on two ranks without compared gradients."""


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return eight texts; the last is one token for each model, without unit or score."""
    words = ["".join(SENTENCES[(i + k) % len(SENTENCES)] for k in range(i % 3 + 1)) for i in range(7)]
    file = tmp_path_factory.mktemp("several") / "documents.jsonl"
    rows = [{"text": text, "from": TEACHERS[route]} for text, route in zip([*words, "x"], ROUTES, strict=True)]
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return file


@pytest.fixture(scope="module")
def runs(tiny: Tiny, documents: Path, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("several_runs")
    mode_plans = {mode: make_plan(tiny, documents, 1, *MODES[mode]) for mode in MODES}
    plans = {(mode, size): with_micro_batch_size(mode_plans[mode], size) for mode in MODES for _, size in GRIDS}
    batches = {mode: first_batches(plans[mode, 1], 1) for mode in ("static", "routed")}
    moving = make_plan(tiny, documents, 2, *MODES["static"], *LEARNS)
    results: dict[tuple[str, int, int], Trained] = {}
    compared: dict[int, Trained] = {}
    for num_ranks in (1, 2):
        grids = [(mode, ranks, size) for mode in MODES for ranks, size in GRIDS if ranks == num_ranks]
        jobs = [Training(plans[mode, size], batches.get(mode, batches["static"])) for mode, _, size in grids]
        more = [Training(moving, batches["static"], compare_gradients=True), Training(moving, batches["static"])]
        *done, compared[num_ranks], plain = in_world(num_ranks, train, [*jobs, *more], folder / str(num_ranks))
        results |= dict(zip(grids, done, strict=True))
    cases = {}
    for mode, plan in mode_plans.items():
        batch = batches.get(mode, batches["static"])[0]
        cases[mode] = case(plan, batch, {grid: results[mode, *grid] for grid in GRIDS})
    return Runs(cases, compared, plain)


def case(plan: Plan, batch: Batch, by_grid: dict[tuple[int, int], Trained]) -> Case:
    rows = rows_of_batch(batch, ROUTES if plan.config.aggregation.type == "routed" else ())
    run = plain_run(plan, [rows])
    student, *teachers = (trainer.load(run_of["model"], 0.0) for run_of in (run["student"], *run["teachers"]))
    texts = [trainer.read(run, student, teachers, row) for row in rows]
    total, point = trainer.objective(run, texts, 1.0)
    kd = run["loss"]["kd_weight"] * trainer.kd(run, texts)[0]
    choices = trainer.select_teachers(run["aggregation"], texts)
    says = [
        sum(
            trainer.teacher_weight(run, i, text)
            for text, choice in zip(texts, choices, strict=True)
            if choice in (None, i)
        )
        / len(texts)
        for i in range(len(teachers))
    ]
    return Case(plan, point, says, (gradient_of(student, kd), gradient_of(student, total - kd)), by_grid)


def gradient_of(model: PreTrainedModel, loss: Tensor) -> Tensor:
    """Return the full gradient as one vector."""
    gradients = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
    return torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("phase", ["train", "val"])
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("mode", MODES)
def test_totals_equal_the_references(runs: Runs, mode: str, grid: tuple[int, int], phase: str) -> None:
    """Bugs: weights of other rows; a choice per rank or microbatch; a mean of means instead of a mean of units, or the
    reverse; weights that change a normalizer; validation by another rule than training."""
    case = runs.cases[mode]
    trained = case.by_grid[grid]
    raw = trained.curve[0] if phase == "train" else trained.evaluation
    values = objective_values(case.plan.config, {name: Last(value) for name, value in raw.items()}, 1.0, phase)
    kd, ce = case.point["kd"], case.point["ce"]
    assert values[f"{phase}/ce"] == pytest.approx(ce, rel=RTOL)
    assert values[f"{phase}/kd"] == pytest.approx(kd, rel=RTOL)
    assert values[f"{phase}/loss"] == pytest.approx(0.7 * kd + 0.4 * ce, rel=RTOL)
    for name, share in zip(TEACHERS, case.says, strict=True):
        if share:
            assert values[f"{phase}/kd/{name}"] == pytest.approx(case.point[f"kd/{name}"], rel=RTOL)
        if mode != "static":
            kind = "share" if mode in ("sequence", "batch", "routed") else "weight"
            assert values[f"{phase}/{kind}/{name}"] == pytest.approx(share, rel=RTOL)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_norm_equals_the_references(runs: Runs, mode: str, grid: tuple[int, int]) -> None:
    case = runs.cases[mode]
    norm = float(sum(case.objectives).norm())
    assert case.by_grid[grid].curve[0]["grad_norm"] == pytest.approx(norm, rel=RTOL)


def test_both_teachers_have_a_say(runs: Runs) -> None:
    """Without this the tests above prove little: choices and weights must differ between sequences."""
    assert runs.cases["batch"].says in ([1, 0], [0, 1])
    for mode in ("bits_per_byte", "entropy", "max_probability", "sequence"):
        assert min(runs.cases[mode].says) > 0.02, mode


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_two_gradients_are_those_of_autograd(runs: Runs, num_ranks: int) -> None:
    """Bugs: norms or products of one rank's shards; gradients without kd_weight and ce_weight, after clipping, or of a
    microbatch. The cosine is at most 1, so its tolerance is absolute."""
    kd, ce = runs.cases["static"].objectives
    values = runs.compared[num_ranks].curve[0]
    assert values["kd_grad_norm"] == pytest.approx(float(kd.norm()), rel=RTOL)
    assert values["ce_grad_norm"] == pytest.approx(float(ce.norm()), rel=RTOL)
    assert values["kd_ce_cosine"] == pytest.approx(float(kd @ ce / (kd.norm() * ce.norm())), abs=RTOL)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_comparing_gradients_changes_no_update(runs: Runs, num_ranks: int) -> None:
    compared = runs.compared[num_ranks]
    assert "kd_grad_norm" not in runs.plain.curve[0]
    for name, value in runs.plain.curve[0].items():
        if name != "peak_memory_gb":
            assert compared.curve[0][name] == pytest.approx(value, rel=RTOL), name
    for name, weight in runs.plain.weights.items():
        torch.testing.assert_close(compared.weights[name], weight, rtol=RTOL, atol=WEIGHT_ATOL)


def test_averaged_logits(tiny: Tiny, documents: Path, tmp_path: Path) -> None:
    """KL from softmax(Σ w z / Σ w). Bug: the mean of the teachers' KLs."""
    plan = make_plan(
        tiny,
        documents,
        4,
        "aggregation=averaged_logits",
        "teachers.0.type=same_tokenizer",
        f"teachers.0.model={tiny.student}",
        "teachers.0.weight=0.3",
        "teachers.1.weight=0.6",
    )
    (batch,) = first_batches(plan, 1)
    (trained,) = in_world(1, train, [Training(plan, [batch])], tmp_path)
    student, teacher = load(str(tiny.student)), load(str(tiny.teacher_same))
    total, units = 0.0, 0
    for ids, length in zip(batch.student.ids, batch.student.lengths.tolist(), strict=True):
        with torch.no_grad():
            z = [model(input_ids=ids[None, :length]).logits[0, :-1] for model in (student, teacher)]
        log_p = z[0].double().log_softmax(-1)
        mean = ((0.3 * z[0].double() + 0.6 * z[1].double()) / 0.9).log_softmax(-1)
        total += float((mean.exp() * (mean - log_p)).sum())
        units += length - 1
    for raw, phase in ((trained.curve[0], "train"), (trained.evaluation, "val")):
        assert raw["kd"] == pytest.approx(total / units, rel=RTOL)
        values = objective_values(plan.config, {name: Last(value) for name, value in raw.items()}, 1.0, phase)
        assert values[f"{phase}/kd"] == pytest.approx(total / units, rel=RTOL)
        assert not [name for name in values if name.startswith(f"{phase}/kd/")]
