"""How the student and its teachers are laid out over ranks leaves no trace in what is learned (DESIGN §4)."""

import pytest
import torch

from tests.tiny import Tiny
from tests.workers.local import Trained, Training, first_batches, in_world, plan_of, train

LAYOUTS = {
    "student tp=2": ["student.parallelism.tp=2"],
    "student tp=2, sequence parallel": ["student.parallelism={tp: 2, sequence_parallel: true}"],
    "teachers tp=2": ["teachers.0.parallelism.tp=2", "teachers.1.parallelism.tp=2"],
    "all tp=2, one of them data parallel": ["student.parallelism.tp=2", "teachers.0.parallelism.tp=2"],
    "all tp=2, logits": [
        "student.parallelism.tp=2",
        "teachers.0.parallelism.tp=2",
        "teachers.1.parallelism.tp=2",
        "handoff=logits",
    ],
    "scored by teachers of tp=2": [
        "teachers.1.parallelism.tp=2",
        "aggregation.weights=bits_per_byte",
    ],
}
NAMES = ("ce", "kd/same", "kd/cross", "grad_norm")


@pytest.fixture(scope="module")
def trained(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trained, Trained]]:
    """Of each layout: on one rank without it, and on two ranks."""
    folder = tmp_path_factory.mktemp("layouts")

    def job(*options: str) -> Training:
        plan = plan_of(
            tiny.overrides("train.max_steps=2", "train.micro_batch_size=2", "student.optimizer.eps=1e-3", *options)
        )
        return Training(plan, first_batches(plan, 2))

    def without_layout(options: list[str]) -> list[str]:
        return [option for option in options if "parallelism" not in option]

    alone = in_world(1, train, [job(*without_layout(options)) for options in LAYOUTS.values()], folder / "one")
    laid_out = in_world(
        2, train, [job("cluster.cpu_ranks=2", *options) for options in LAYOUTS.values()], folder / "two"
    )
    return dict(zip(LAYOUTS, zip(alone, laid_out, strict=True), strict=True))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_and_the_weights_are_those_of_one_rank(
    trained: dict[str, tuple[Trained, Trained]], layout: str
) -> None:
    """Sums of up to some hundred fp32 numbers in another order, over two steps of AdamW with a large epsilon."""
    alone, laid_out = trained[layout]
    for ours, theirs in zip(laid_out.curve, alone.curve, strict=True):
        for name in NAMES:
            assert ours[name] == pytest.approx(theirs[name], rel=2e-5), name
    for name, value in alone.evaluation.items():
        if name != "peak_memory_gb":
            assert laid_out.evaluation[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert laid_out.weights.keys() == alone.weights.keys()
    for name, weight in alone.weights.items():
        torch.testing.assert_close(laid_out.weights[name], weight, rtol=1e-4, atol=1e-6, msg=name)
