"""Compiled losses equal the plain ones, and losses that cannot be compiled still run."""

from collections.abc import Callable, Iterator
from functools import cache
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from nemo_opd.kernels.launch import compiling
from nemo_opd.losses import fused
from nemo_opd.losses.fused import softmax
from tests.losses.cases import LOSSES, Case

CASES = [variant for case in LOSSES for variant in ([case] if case.name != "same_vocab" else case.divergences())]


@pytest.fixture(scope="module")
def graphs() -> Iterator[Callable[[fused.Fused[..., Any]], Callable[..., Any]]]:
    """Trace each function once for all losses that call it, as one graph without side effects."""
    yield cache(lambda function: torch.compile(function.function, fullgraph=True, backend="aot_eager"))
    torch.compiler.reset()


@pytest.fixture
def traced(graphs: Callable[[fused.Fused[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Trace functions inside as for a GPU."""

    with (
        patch.object(fused.Fused, "as_compiled", lambda self, *args, **more: graphs(self)(*args, **more)),
        compiling(True),
    ):
        yield


@pytest.mark.filterwarnings("error:.*could not be compiled")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_traced_loss_equals_the_eager_one(case: Case, traced: None) -> None:
    """Bug: a function with a graph break, or a side effect that tracing loses."""
    batch = case.batch(0, torch.float64)
    results = case.value_and_gradient(batch)
    with compiling(False):
        expected = case.value_and_gradient(batch)
    for ours, theirs in zip(results, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-13)


@pytest.mark.world
@pytest.mark.filterwarnings("error:.*could not be compiled")
def test_a_compiled_loss_equals_the_eager_one() -> None:
    """Bug: a graph that the compiler turns into another value. For CPUs it writes C++."""
    (case,) = (case for case in CASES if case.name == "same_vocab-jsd")
    batch = case.batch(0, torch.float32)
    with compiling(True):
        results = case.value_and_gradient(batch)
    for ours, theirs in zip(results, case.value_and_gradient(batch), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_one_form_is_compiled_for_any_number_of_rows() -> None:
    """Bug: a compilation for each number of rows, which takes minutes in a run."""
    forms = CompileCounter()
    counted = torch.compile(softmax.function, fullgraph=True, backend=forms)
    with patch.object(softmax, "as_compiled", counted), compiling(True):
        for number in (7, 3, 2, 1, 0, 64):
            softmax(torch.randn(number, 5))
    assert forms.frame_count == 1


def test_a_function_that_cannot_be_compiled_runs_and_warns_once() -> None:
    """Bug: the run stops, or warns in every step."""

    @fused.fused
    def asks_the_user(rows: torch.Tensor) -> torch.Tensor:
        print("a side effect that a graph has no place for", rows.sum().item())
        return rows * 2

    rows = torch.ones(3, 2)
    with compiling(True):
        with pytest.warns(UserWarning, match=r"asks_the_user.*could not be compiled.*train\.compile_losses=false"):
            assert torch.equal(asks_the_user(rows), rows * 2)
        assert torch.equal(asks_the_user(rows), rows * 2)


def test_by_default_nothing_is_compiled_on_a_cpu() -> None:
    """Bug: small runs and tests wait for a compiler."""
    called = fused.Fused(lambda rows: rows)
    with patch.object(fused.Fused, "as_compiled", side_effect=AssertionError):
        called(torch.ones(3, 2))
