"""The layouts of student and teachers over ranks do not change the result of training."""

import pytest
import torch

from tests.tiny import Tiny
from tests.workers import on_policy
from tests.workers.local import Trained, Training, first_batches, in_world, plan_of, train

pytestmark = pytest.mark.world

LAYOUTS = {
    "student tp=2, sequence parallel": ["student.parallelism={tp: 2, sequence_parallel: true}"],
    "all tp=2, one of them data parallel": ["student.parallelism.tp=2", "teachers.0.parallelism.tp=2"],
    "scored by teachers of tp=2": [
        "teachers.1.parallelism.tp=2",
        "aggregation.weights=bits_per_byte",
    ],
}
ALL = ["student.parallelism.tp=2", "teachers.0.parallelism.tp=2", "teachers.1.parallelism.tp=2", "handoff=logits"]
CONTEXT = "behind prompts of the teachers, all tp=2, logits"
"""An on-policy run with `on_policy.CONTEXTS`."""
NAMES = ("ce", "kd/same", "kd/cross", "grad_norm")
TERMS = {
    "p_kl, mean": ["loss=p_kl", "loss.merge=mean"],
    "gold, trl": ["loss=gold", "loss.compat=trl"],
    "strict, continuation": ["loss=strict", "loss.continuation_weight=1"],
    "uld, logits": ["loss=uld", "loss.compat=trl", "handoff=logits"],
}
"""Losses for two cross-tokenizer teachers, whose tokens often span several of the student's.

One loss for each way to read rows; losses/test_parallel.py has all losses.
"""


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trained, Trained]]:
    """Return results on one rank without the layout and on two ranks with it, keyed by layout."""
    folder = tmp_path_factory.mktemp("layouts")

    def job(*options: str) -> Training:
        plan = plan_of(
            tiny.overrides("train.max_steps=2", "train.micro_batch_size=2", "student.optimizer.eps=1e-3", *options)
        )
        return Training(plan, first_batches(plan, 2))

    def without_layout(options: list[str]) -> list[str]:
        return [option for option in options if "parallelism" not in option]

    prompts = on_policy.write_prompts(tmp_path_factory.mktemp("prompts"))

    def in_context(*options: str) -> Training:
        plan = on_policy.plan(tiny, prompts, *on_policy.CONTEXTS, *options)
        return Training(plan, [on_policy.batch_of(plan, 0)])

    one = [job(*without_layout(options)) for options in LAYOUTS.values()]
    two = [job("cluster.cpu_ranks=2", *options) for options in LAYOUTS.values()]
    alone = in_world(1, train, [*one, in_context()], folder / "one")
    laid_out = in_world(2, train, [*two, in_context("cluster.cpu_ranks=2", *ALL)], folder / "two")
    return dict(zip([*LAYOUTS, CONTEXT], zip(alone, laid_out, strict=True), strict=True))


@pytest.fixture(scope="module")
def finer(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trained, Trained]]:
    """Return results on one rank and with tp=2, keyed by loss; the second teacher has alm."""
    folder = tmp_path_factory.mktemp("finer")
    models = [f"student.model={tiny.teacher_cross}", f"teachers.0.model={tiny.student}"]
    second = ["teachers.1.type=cross_tokenizer", "teachers.1.loss.type=alm"]
    sizes = ["train.max_steps=1", "train.micro_batch_size=2", "student.optimizer.eps=1e-3"]

    def job(*options: str) -> Training:
        plan = plan_of(tiny.overrides(*models, *second, *sizes, *options))
        return Training(plan, first_batches(plan, 1))

    alone = in_world(1, train, [job(*options) for options in TERMS.values()], folder / "one")
    tensor = ["cluster.cpu_ranks=2", "student.parallelism.tp=2"]
    laid_out = in_world(2, train, [job(*tensor, *options) for options in TERMS.values()], folder / "two")
    return dict(zip(TERMS, zip(alone, laid_out, strict=True), strict=True))


@pytest.mark.parametrize("layout", [*LAYOUTS, CONTEXT])
def test_curve_and_weights_equal_one_ranks(trained: dict[str, tuple[Trained, Trained]], layout: str) -> None:
    """Tolerance: sums of about a hundred fp32 numbers in another order, over two AdamW steps with a large epsilon."""
    check_equal(*trained[layout])


@pytest.mark.parametrize("term", TERMS)
def test_units_of_several_student_tokens_equal_one_ranks(finer: dict[str, tuple[Trained, Trained]], term: str) -> None:
    """Bug: rows that units of both ranks need get the gradient of one unit only."""
    check_equal(*finer[term])


def check_equal(alone: Trained, laid_out: Trained) -> None:
    for ours, theirs in zip(laid_out.curve, alone.curve, strict=True):
        for name in NAMES:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), name
    for name, value in alone.evaluation.items():
        if name != "peak_memory_gb":
            assert laid_out.evaluation[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert laid_out.weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        torch.testing.assert_close(laid_out.weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)
