"""A step on rollouts is the same for all cuts of a batch (methods.md §7.1 and §10)."""

from pathlib import Path

import pytest
import torch

from nemo_opd.types import Batch
from tests.tiny import Tiny
from tests.workers.local import RTOL, WEIGHT_ATOL, Trained, Training, in_world, train, with_micro_batch_size
from tests.workers.on_policy import LOSSES, batch_of, plan, write_prompts
from tests.workers.plain_trainer import load

pytestmark = pytest.mark.world

GRIDS = ((1, 4), (2, 2))
"""Numbers of ranks and microbatch sizes."""


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("on_policy"))


@pytest.fixture(scope="module")
def trained(tiny: Tiny, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    """Return results on every grid, and of single rows in another order, keyed by loss."""
    plans = {name: plan(tiny, prompts, *overrides) for name, overrides in LOSSES.items()}
    batches = {name: [batch_of(run_plan, seed) for seed in range(2)] for name, run_plan in plans.items()}
    results: dict[str, list[Trained]] = {name: [] for name in LOSSES}
    for ranks, micro in GRIDS:
        jobs = [Training(with_micro_batch_size(plans[name], micro), batches[name]) for name in LOSSES]
        folder = tmp_path_factory.mktemp("world") / f"{ranks}_{micro}"
        for name, result in zip(LOSSES, in_world(ranks, train, jobs, folder), strict=True):
            results[name].append(result)
    order = torch.tensor([4, 1, 6, 0, 3, 5, 2])
    jobs = [
        Training(with_micro_batch_size(run_plan, 1), [in_order(batch, order) for batch in batches[name]])
        for name, run_plan in plans.items()
    ]
    for name, result in zip(LOSSES, in_world(1, train, jobs, Path()), strict=True):
        results[name].append(result)
    return results


def in_order(batch: Batch, order: torch.Tensor) -> Batch:
    return batch.map(lambda tensor, _: tensor[order])


@pytest.mark.parametrize("loss", LOSSES)
def test_nothing_depends_on_how_a_batch_is_cut_or_ordered(trained: dict[str, list[Trained]], loss: str) -> None:
    first, *other_runs = trained[loss]

    assert first.curve[0]["grad_norm"] > 1e-3
    for run in other_runs:
        for point, other_point in zip(first.curve, run.curve, strict=True):
            learned = {name: value for name, value in point.items() if name != "peak_memory_gb"}
            assert learned == pytest.approx({name: other_point[name] for name in learned}, rel=RTOL, abs=1e-6)
        for name, weight in first.weights.items():
            torch.testing.assert_close(run.weights[name], weight, rtol=0, atol=WEIGHT_ATOL)


@pytest.mark.parametrize("loss", ["sampled_kl, sequences", "grpo"])
def test_some_weights_are_cut_and_some_sequences_dropped(trained: dict[str, list[Trained]], loss: str) -> None:
    """Without this the test of invariance would not cover truncation and vetoes."""
    metrics = trained[loss][0].curve[0]
    names = [name for name in metrics if name.startswith(("policy/truncated_fraction", "policy/vetoed_fraction"))]

    assert len(names) == (2 if loss == "grpo" else 4)
    assert all(0 < metrics[name] < 1 for name in names)


def test_warped_samples_weigh_more_than_one_and_are_not_clipped_at_first(trained: dict[str, list[Trained]]) -> None:
    """Bug: the ratio is taken with the warped log-probabilities. In the first step it is 1; the weight is not."""
    metrics = trained["sampled_kl, warped"][0].curve[0]
    names = [name for name in metrics if name.startswith("policy/ratio")]

    assert len(names) == 2
    for name in names:
        assert metrics[name] == pytest.approx(1, abs=1e-4)
        assert metrics[name.replace("ratio", "clip_fraction")] == 0
        assert metrics[name.replace("ratio", "weight_max")] > 1.2


@torch.no_grad()
def test_a_teacher_with_a_context_is_compared_on_the_response(
    tiny: Tiny, prompts: Path, trained: dict[str, list[Trained]]
) -> None:
    """Bug: the teacher is read at the student's positions. The oracle runs the models sequence by sequence."""
    run_plan = plan(tiny, prompts, *LOSSES["context"])
    batch, metrics = batch_of(run_plan, 0), trained["context"][0].curve[0]
    student, teacher = load(run_plan.config.student.model), load(run_plan.config.teachers[1].model)
    rows = batch.teachers[1]
    assert rows.moved is not None
    assert len(set(rows.moved.by.tolist())) > 1
    assert run_plan.survey.widths[1] == run_plan.config.train.max_length + max(rows.moved.by.tolist())
    kd, gaps, count = 0.0, 0.0, 0
    for b, moved in enumerate(rows.moved.by.tolist()):
        places = batch.student.loss_mask[b].nonzero().flatten()
        ids = batch.student.ids[b, places]
        assert ids.equal(rows.tokens.ids[b, places + moved])
        log_p = student(batch.student.ids[b : b + 1]).logits[0, places - 1].log_softmax(-1)
        log_q = teacher(rows.tokens.ids[b : b + 1]).logits[0, places + moved - 1].log_softmax(-1)
        # Without the context, the teacher reads the student's tokens.
        plain = teacher(batch.student.ids[b : b + 1]).logits[0, places - 1].log_softmax(-1)
        assert batch.student.ids[b, : batch.student.lengths[b]].equal(
            rows.variants[0].ids[b, : rows.variants[0].lengths[b]]
        )
        kd += float((log_q.exp() * (log_q - log_p)).sum())
        gaps += float((log_q - plain).gather(1, ids[:, None]).sum())
        count += len(places)

    assert metrics["kd/same"] == pytest.approx(kd / count, rel=1e-4)
    assert metrics["privilege_gap/same"] == pytest.approx(gaps / count, rel=1e-3, abs=1e-6)
    assert {name for name in metrics if "gap" in name} == {
        "privilege_gap/same",
        "privilege_gap/cross",
        "contrast_gap/cross",
    }
    assert metrics["contrast_gap/cross"] != metrics["privilege_gap/cross"]
    assert 0 <= metrics["leakage/same"] < 1


def test_losses_differ(trained: dict[str, list[Trained]]) -> None:
    """Bug: a setting does not reach the loss."""
    norms = {loss: results[0].curve[0]["grad_norm"] for loss, results in trained.items()}

    assert len({round(norm, 5) for norm in norms.values()}) == len(LOSSES)


@pytest.mark.parametrize("loss", ["reverse_kl", "jsd", "tcad", "policy_gradient"])
def test_a_student_that_is_its_teacher_learns_nothing(tiny: Tiny, prompts: Path, loss: str) -> None:
    more = ["loss.coverage_coef=0"] if loss == "tcad" else []
    twin = plan(tiny, prompts, f"loss={loss}", *more, f"teachers.0.model={tiny.student}")
    batch = batch_of(twin, 0)
    assert batch.sampled is not None

    (result,) = in_world(1, train, [Training(twin, [batch])], Path())

    assert result.curve[0]["kd/same"] == pytest.approx(0, abs=1e-6)
    assert result.curve[0]["grad_norm"] == pytest.approx(0, abs=1e-6)
