"""Training gives the same curve and weights for all cuts of a batch into microbatches and ranks (methods.md §7.1).

All runs on two ranks share one start of the processes, which is slow.

Tolerance: all arithmetic is fp32 (2⁻²⁴ = 6e-8 relative), so sums of up to 1e4 terms of mixed sign err by about 1e-6 of
their size: less than 1e-5 on any mean. rtol 1e-4 leaves room for growth over five steps. AdamW divides by
√v + eps, so a gradient that is only rounding error could become a full step; eps = 1e-3 bounds a weight's error by
steps · lr · 1e-6 / 1e-3 = 5e-5 · lr / 1e-2.
"""

from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from nemo_opd.preflight.plan import Plan
from nemo_opd.types import Batch, TeacherRows, TokenRows
from tests.rows import num_rows
from tests.tiny import Tiny, save_documents
from tests.workers.local import RTOL, WEIGHT_ATOL, Trained, Training, first_batches, in_world, plan_of, train
from tests.workers.plain_trainer import plain_training

pytestmark = pytest.mark.world

STEPS = 5
MICRO_BATCH_SIZES = (1, 2, 4)
WORLDS = (1, 2)


def make_plan(tiny: Tiny, documents: Path, micro_batch_size: int, *more: str) -> Plan:
    """Plan 26 documents in 17 packed rows; in the third batch one rank has only empty rows."""
    return plan_of(
        [
            *tiny.overrides(),
            f"data.train.arrow_files={documents}",
            "train.global_batch_size=8",
            f"train.micro_batch_size={micro_batch_size}",
            f"train.max_steps={STEPS}",
            "student.optimizer.lr=1e-2",
            "student.optimizer.eps=1e-3",
            "student.scheduler.warmup_steps=0",
            *more,
        ]
    )


@dataclass(frozen=True)
class Runs:
    """The same training on all grids."""

    plan: Plan
    batches: list[Batch]
    by_grid: dict[tuple[int, int], Trained]
    """Results, keyed by ranks and microbatch size."""
    continued: dict[tuple[int, int], Trained]
    """Results, keyed by the number of ranks in the first two steps and in the last three."""
    copies: Trained
    """Result of two ranks that each have a copy of the student."""
    of_copies: dict[str, Trained]
    """Results of the last steps after a checkpoint of copies, with copies and without."""
    exported: Path


@pytest.fixture(scope="module")
def runs(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    folder = tmp_path_factory.mktemp("invariance")
    documents = save_documents(folder / "documents.arrow", 26)
    plans = {size: make_plan(tiny, documents, size) for size in MICRO_BATCH_SIZES}
    plan = plans[2]
    batches = first_batches(plan, STEPS)
    assert [num_rows(batch) for batch in batches] == [8, 8, 1, 8, 8]
    assert all(len(batch) > num_rows(batch) for batch in batches)
    full_runs = [Training(plans[size], batches) for size in MICRO_BATCH_SIZES]
    full_runs[-1] = replace(full_runs[-1], export_to=folder / "exported")
    begun_runs = {world: Training(plan, batches[:2], save_to=folder / f"checkpoint_{world}") for world in WORLDS}
    resumed_runs = {world: Training(plan, batches[2:], load_from=folder / f"checkpoint_{world}") for world in WORLDS}
    *alone, _, same_1 = in_world(1, train, [*full_runs, begun_runs[1], resumed_runs[1]], folder / "one")
    copied = make_plan(tiny, documents, 2, "cluster.cpu_ranks=2", "+student.parallelism.replicas=2")
    saved = folder / "checkpoint_copies"
    of_copies = [
        Training(copied, batches),
        Training(copied, batches[:2], save_to=saved),
        Training(copied, batches[2:], load_from=saved),
        Training(plan, batches[2:], load_from=saved),
    ]
    *paired, _, from_one, same_2, copies, _, copies_resumed, sharded = in_world(
        2, train, [*full_runs, begun_runs[2], resumed_runs[1], resumed_runs[2], *of_copies], folder / "two"
    )
    (from_two,) = in_world(1, train, [resumed_runs[2]], folder / "one")
    by_grid = {(1, size): result for size, result in zip(MICRO_BATCH_SIZES, alone, strict=True)}
    by_grid |= {(2, size): result for size, result in zip(MICRO_BATCH_SIZES, paired, strict=True)}
    continued = {(1, 1): same_1, (1, 2): from_one, (2, 1): from_two, (2, 2): same_2}
    return Runs(
        plan, batches, by_grid, continued, copies, {"copies": copies_resumed, "sharded": sharded}, folder / "exported"
    )


@pytest.fixture(scope="module")
def oracle(runs: Runs) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    return plain_training(runs.plan, runs.batches)


GRID = [(world, size) for world in WORLDS for size in MICRO_BATCH_SIZES]


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), GRID)
def test_curve_equals_the_plain_trainers(runs: Runs, oracle, num_ranks: int, micro_batch_size: int) -> None:
    """Bugs: a mean over microbatches or ranks instead of units; padding that counts; FSDP averages gradients; a term is
    multiplied by the number of microbatches; units of one rank as the normalizer."""
    curve, _ = oracle
    for step, (expected, actual) in enumerate(zip(curve, runs.by_grid[num_ranks, micro_batch_size].curve, strict=True)):
        for name, value in expected.items():
            assert actual[name] == pytest.approx(value, rel=RTOL), (step, name)


@pytest.mark.parametrize(("num_ranks", "micro_batch_size"), GRID)
def test_weights_equal_the_plain_trainers(runs: Runs, oracle, num_ranks: int, micro_batch_size: int) -> None:
    _, weights = oracle
    trained = runs.by_grid[num_ranks, micro_batch_size].weights
    start = AutoModelForCausalLM.from_pretrained(runs.plan.config.student.model).state_dict()
    for name, value in weights.items():
        assert (value - start[name]).abs().max() > 100 * WEIGHT_ATOL, f"{name} hardly moved"
        torch.testing.assert_close(trained[name], value, rtol=RTOL, atol=WEIGHT_ATOL, msg=lambda m, n=name: f"{n}: {m}")


def test_curve_moves_more_than_the_tolerance(oracle) -> None:
    """Without this the tests above prove little: wrong gradients must show in the next step."""
    curve, _ = oracle
    assert abs(curve[4]["ce"] - curve[0]["ce"]) > 100 * RTOL * curve[0]["ce"]
    assert all(point["grad_norm"] > 1.0 for point in curve), "the gradient is clipped in every step"


def test_evaluation_does_not_depend_on_the_grid(runs: Runs) -> None:
    reference = runs.by_grid[1, 1].evaluation
    of_teachers = {"kd/cross", "kd/same", "kd_coverage/cross", "kd_coverage/same", "changed_history/cross"}
    names = {name for name in reference if not name.startswith(("class/", "chunk/", "position/", "calibration_gap/"))}
    of_teachers |= {"overlap/cross", "overlap/same", "kd_positions/cross", "kd_mass/cross"}
    of_teachers |= {name for name in reference if name.startswith("kd_positions/cross/")}
    of_texts = {"bits_per_byte", "shared_bits_per_byte", "per_text"}
    assert names == {"ce", "kd_part/0", "kd_part/1", "accuracy"} | of_texts | of_teachers
    assert {"class/word/kd/same", "chunk/cross/1:1/bits_per_byte"} <= set(reference)
    for result in runs.by_grid.values():
        assert result.evaluation == pytest.approx(reference, rel=RTOL)


@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(1, 1), (2, 2)])
def test_resumed_training_is_the_same_to_the_last_bit(runs: Runs, ranks_before: int, ranks_after: int) -> None:
    """Bug: a checkpoint drops or rounds optimizer moments, step counters, the schedule or weights."""
    uninterrupted, resumed = runs.by_grid[ranks_before, 2], runs.continued[ranks_before, ranks_after]
    for expected, actual in zip(uninterrupted.curve[2:], resumed.curve, strict=True):
        assert {**actual, "peak_memory_gb": 0} == {**expected, "peak_memory_gb": 0}
    for name, value in uninterrupted.weights.items():
        assert torch.equal(resumed.weights[name], value), name


@pytest.mark.parametrize(("ranks_before", "ranks_after"), [(1, 2), (2, 1)])
def test_checkpoints_are_read_by_another_number_of_ranks(runs: Runs, ranks_before: int, ranks_after: int) -> None:
    resumed = runs.continued[ranks_before, ranks_after]
    for expected, actual in zip(runs.by_grid[ranks_before, 2].curve[2:], resumed.curve, strict=True):
        assert {**actual, "peak_memory_gb": 0} == pytest.approx({**expected, "peak_memory_gb": 0}, rel=RTOL)
    for name, value in runs.by_grid[ranks_before, 2].weights.items():
        torch.testing.assert_close(resumed.weights[name], value, rtol=RTOL, atol=WEIGHT_ATOL)


def test_copies_learn_the_same(runs: Runs, oracle) -> None:
    """Bugs: gradients are averaged within a copy only; microbatches before the last are lost or doubled."""
    curve, weights = oracle
    for expected, actual in zip(curve, runs.copies.curve, strict=True):
        assert {name: actual[name] for name in expected} == pytest.approx(expected, rel=RTOL)
    for name, value in weights.items():
        torch.testing.assert_close(runs.copies.weights[name], value, rtol=RTOL, atol=WEIGHT_ATOL)


def test_training_of_copies_is_resumed(runs: Runs) -> None:
    """With copies to the last bit; the checkpoint also loads on ranks that shard one copy."""
    for expected, actual in zip(runs.copies.curve[2:], runs.of_copies["copies"].curve, strict=True):
        assert {**actual, "peak_memory_gb": 0} == {**expected, "peak_memory_gb": 0}
    for name, value in runs.copies.weights.items():
        assert torch.equal(runs.of_copies["copies"].weights[name], value), name
        torch.testing.assert_close(runs.of_copies["sharded"].weights[name], value, rtol=RTOL, atol=WEIGHT_ATOL)


def test_export_of_two_ranks_loads_with_transformers(runs: Runs) -> None:
    """Bugs: shards instead of full tensors; names of a wrapped model; a tied head is written twice."""
    model = AutoModelForCausalLM.from_pretrained(runs.exported)
    trained = runs.by_grid[2, 4].weights
    for name, value in model.state_dict().items():
        assert torch.equal(value, trained[name]), name
    tokenizer = AutoTokenizer.from_pretrained(runs.exported)
    assert tokenizer.get_vocab() == AutoTokenizer.from_pretrained(runs.plan.config.student.model).get_vocab()


def test_order_of_rows_does_not_matter(runs: Runs, tmp_path: Path) -> None:
    backwards = [reordered(batch, list(range(len(batch)))[::-1]) for batch in runs.batches]
    (result,) = in_world(1, train, [Training(runs.plan, backwards)], tmp_path)
    for expected, actual in zip(runs.by_grid[1, 2].curve, result.curve, strict=True):
        assert {**actual, "peak_memory_gb": 0} == pytest.approx({**expected, "peak_memory_gb": 0}, rel=RTOL)


def test_ids_in_the_padding_do_not_matter(runs: Runs, tmp_path: Path) -> None:
    """Bug: padding is scored, attended to, or counted as tokens or bytes. Equal to the last bit."""
    filled = [with_filled_padding(batch, 7) for batch in runs.batches]
    assert not torch.equal(filled[0].student.ids, runs.batches[0].student.ids)
    (result,) = in_world(1, train, [Training(runs.plan, filled)], tmp_path)
    for name, value in runs.by_grid[1, 2].weights.items():
        assert torch.equal(result.weights[name], value), name
    assert result.evaluation == runs.by_grid[1, 2].evaluation


def reordered(batch: Batch, order: list[int]) -> Batch:
    def tokens(rows: TokenRows) -> TokenRows:
        return TokenRows(rows.ids[order], rows.lengths[order], rows.loss_mask[order], rows.num_bytes[order])

    def teacher(rows: TeacherRows) -> TeacherRows:
        chunks = rows.chunks
        if chunks is not None:
            chunks = replace(chunks, student=chunks.student[order], teacher=chunks.teacher[order])
        return TeacherRows(tokens(rows.tokens), chunks)

    return Batch(tokens(batch.student), tuple(map(teacher, batch.teachers)))


def with_filled_padding(batch: Batch, token: int) -> Batch:
    def filled(rows: TokenRows) -> TokenRows:
        is_padding = torch.arange(rows.ids.shape[1]) >= rows.lengths[:, None]
        return replace(rows, ids=rows.ids.masked_fill(is_padding, token))

    teachers = tuple(replace(rows, tokens=filled(rows.tokens)) for rows in batch.teachers)
    return replace(batch, student=filled(batch.student), teachers=teachers)
