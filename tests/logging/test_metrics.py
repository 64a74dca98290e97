"""Catches means of means, lost keys, and lost time or entries of phases."""

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_opd.logging.metrics import Timer, merge, values
from nemo_opd.types import Last, Max, Mean, Sum

NUMBERS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8)


@given(st.lists(NUMBERS, min_size=1, max_size=6))
def test_merging_parts_equals_computing_over_all_of_them(parts: list[list[float]]) -> None:
    merged = values(
        merge(
            {"mean": Mean(sum(p), len(p)), "sum": Sum(sum(p)), "max": Max(max(p)), "last": Last(p[-1])} for p in parts
        )
    )
    pooled = [number for part in parts for number in part]
    # Sums in two orders differ by at most n rounding errors of the largest partial sum.
    error = 4 * len(pooled) * 2**-53 * sum(map(abs, pooled))
    assert merged["sum"] == pytest.approx(math.fsum(pooled), abs=error, rel=0)
    assert merged["mean"] == pytest.approx(math.fsum(pooled) / len(pooled), abs=error, rel=0)
    assert merged["max"] == sorted(pooled)[-1]
    assert merged["last"] == pooled[-1]


def test_a_metric_may_be_missing_from_some_parts() -> None:
    merged = merge([{"a": Sum(1.0)}, {"b": Mean(4.0, 2)}, {"a": Sum(2.0)}])
    assert values(merged) == {"a": 3.0, "b": 2.0}


def test_merging_two_kinds_under_one_name_is_refused() -> None:
    with pytest.raises(TypeError, match=r"'a' is a Sum .* Mean"):
        merge([{"a": Sum(1.0)}, {"a": Mean(1.0, 1)}])


def test_timer_adds_up_a_phase_and_starts_again_after_take() -> None:
    timer = Timer()
    for _ in range(2):
        with timer.span("step"), timer.span("teacher_forward"):
            time.sleep(0.01)
    with pytest.raises(KeyError), timer.span("failed"):
        raise KeyError
    seconds = timer.take()
    assert seconds["step"] >= seconds["teacher_forward"] >= 0.02
    assert set(seconds) == {"step", "teacher_forward", "failed"}
    assert timer.take() == {}
