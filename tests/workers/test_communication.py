"""Weights that stay gathered, gradients reduced once a step, and copies change the communication but no result."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from nemo_opd.preflight.plan import Plan
from tests.tiny import Tiny
from tests.workers.local import (
    RTOL,
    WEIGHT_ATOL,
    Training,
    evaluate,
    first_batches,
    in_world,
    opened,
    plan_of,
    train_step,
    weights,
)

pytestmark = pytest.mark.world

COLLECTIVES = {
    *("c10d::_allgather_base_", "c10d::_reduce_scatter_base_", "c10d::allgather_", "c10d::allreduce_"),
    *("c10d::alltoall_base_", "_c10d_functional::all_reduce"),
}
"""Collectives of models and losses. The driver's calls scatter, gather and broadcast, and all-gather sizes."""
KEPT = tuple(f"{model}.parallelism.reshard_after_forward=false" for model in ("student", "teachers.0", "teachers.1"))
ONCE = ("student.sync_each_micro_batch=false",)
COPIES = ("cluster.cpu_ranks=2", *(f"+{model}.parallelism.replicas=2" for model in ("student", "teachers.0")))
TENSOR = ("cluster.cpu_ranks=2", "student.parallelism.tp=2")
OPTIONS = {
    "default": (),
    "kept": KEPT,
    "once": ONCE,
    "both": (*KEPT, *ONCE),
    "copies": COPIES,
    "tensor": TENSOR,
}
MICRO_BATCHES = 4
BUDGETS = {"default": (4, 13, 306_000), "tensor": (8, 17, 228_000)}
"""Microbatches of a rank in a step; collectives, and bytes of their tensors, in a microbatch."""


@dataclass(frozen=True)
class Result:
    curve: list[dict[str, float]]
    evaluations: list[dict[str, float]]
    weights: dict[str, Tensor]
    gathers: list[int]
    """Number of all-gathers in each step, the teachers' included."""
    reductions: list[int]
    """Number of reduce-scatters in each step."""
    sums: list[int]
    """Number of all-reduces in each step, except for the gradient's norm."""
    sent: Counter[str]
    """Number of collectives of the last step, keyed by name."""
    sent_bytes: int
    """Bytes of their tensors."""


class Sent(TorchDispatchMode):
    """Counts collectives, keyed by their names in torch.ops, and the bytes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.num_bytes = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (name := operator.name().partition(".")[0]) in COLLECTIVES:
            self.calls[name] += 1
            self.num_bytes += sum(tensor.nbytes for tensor in tree_iter((args, kwargs)) if isinstance(tensor, Tensor))
        return operator(*args, **(kwargs or {}))


def train(job: Training) -> Result:
    curve, evaluations, gathers, reductions, sums = [], [], [], [], []
    with opened(job.plan) as models:
        for batch in job.batches:
            with Sent() as sent:
                curve.append(train_step(models, batch))
            gathers.append(sent.calls["c10d::_allgather_base_"])
            reductions.append(sent.calls["c10d::_reduce_scatter_base_"])
            sums.append(sent.calls["c10d::allreduce_"])
            # Evaluate with weights that were just updated.
            evaluations.append(evaluate(models, batch))
        return Result(curve, evaluations, weights(models), gathers, reductions, sums, sent.calls, sent.num_bytes)


@pytest.fixture(scope="module")
def results(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    def plan(options: Sequence[str]) -> Plan:
        return plan_of(tiny.overrides("train.global_batch_size=8", "train.micro_batch_size=1", *options))

    plans = [plan(options) for options in OPTIONS.values()]
    # All jobs share the tensors: a process can receive 256 of them.
    batches = first_batches(plans[0], 3)
    jobs = [Training(plan, batches) for plan in plans]
    trained = in_world(2, train, jobs, tmp_path_factory.mktemp("communication") / "world")
    return dict(zip(OPTIONS, trained, strict=True))


@pytest.mark.parametrize("name", ["kept", "once", "both", "copies", "tensor"])
def test_results_are_the_same(results: dict[str, Result], name: str) -> None:
    """Bugs: stale weights in the next step or in an evaluation; gradients that are lost or doubled."""
    expected, trained = results["default"], results[name]
    pairs = zip([*expected.curve, *expected.evaluations], [*trained.curve, *trained.evaluations], strict=True)
    for default, actual in pairs:
        assert actual == pytest.approx(default, rel=RTOL)
    for key, value in expected.weights.items():
        torch.testing.assert_close(trained.weights[key], value, rtol=RTOL, atol=WEIGHT_ATOL, msg=key)


def test_gradients_are_reduced_once_a_step(results: dict[str, Result]) -> None:
    per_microbatch, once = results["default"].reductions, results["once"].reductions
    assert [MICRO_BATCHES * number for number in once] == per_microbatch
    assert min(once) > 0
    assert results["kept"].reductions == per_microbatch


def test_copies_are_summed_once_a_step(results: dict[str, Result]) -> None:
    """Bugs: gradients cross nodes after each microbatch; copies drift apart."""
    more = [
        with_copies - default
        for with_copies, default in zip(results["copies"].sums, results["default"].sums, strict=True)
    ]
    assert more == results["once"].reductions


def test_weights_are_gathered_once_a_step(results: dict[str, Result]) -> None:
    """Bug: teachers' weights, which do not change, are gathered in later steps."""
    units = results["once"].reductions
    gathers = results["kept"].gathers
    assert gathers[1:] == units[1:]
    assert units[0] < gathers[0] < results["default"].gathers[0]
    assert results["both"].gathers == gathers


@pytest.mark.parametrize("name", BUDGETS)
def test_a_microbatch_sends_no_more_than_its_budget(results: dict[str, Result], name: str) -> None:
    """Bugs: tensor-parallel ranks gather counts of rows for each block; weights are gathered twice."""
    micro_batches, calls, num_bytes = BUDGETS[name]
    result = results[name]
    assert 0.5 * calls < result.sent.total() / micro_batches <= calls, result.sent
    assert 0.5 * num_bytes < result.sent_bytes / micro_batches <= num_bytes
