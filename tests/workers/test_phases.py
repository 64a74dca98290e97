"""Times of phases. Bugs: nested phases count time twice or lose it; events are read before they happened."""

import time
from contextlib import suppress

import pytest
import torch

from nemo_opd.workers import step as module
from nemo_opd.workers.step import Phases


class Clock:
    """A perf_counter that tests set."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module.time, "perf_counter", clock)
    return clock


def seconds(phases: Phases) -> dict[str, float]:
    return {name: metric.value() for name, metric in phases.take().items()}


def test_phases_add_up_without_the_time_between_them(clock: Clock) -> None:
    phases = Phases("cpu")
    for _ in range(3):
        clock.now += 16.0
        with phases("forward"):
            clock.now += 1.0
        clock.now += 16.0
        with phases("backward"):
            clock.now += 2.0
    assert seconds(phases) == {"phase/forward": 3.0, "phase/backward": 6.0}
    assert seconds(phases) == {}


def test_an_inner_phase_is_not_counted_in_the_outer_one(clock: Clock) -> None:
    """Bug: parts add up to more than the step."""
    phases = Phases("cpu")
    with phases("loss"):
        clock.now += 1.0
        with phases("handoff"):
            clock.now += 2.0
            with phases("loss"):
                clock.now += 4.0
        clock.now += 8.0
    assert seconds(phases) == {"phase/loss": 13.0, "phase/handoff": 2.0}


def test_a_phase_that_raises_ends(clock: Clock) -> None:
    phases = Phases("cpu")
    with suppress(KeyError), phases("forward"):
        clock.now += 1.0
        raise KeyError
    clock.now += 2.0
    with phases("loss"):
        clock.now += 4.0
    assert seconds(phases) == {"phase/forward": 1.0, "phase/loss": 4.0}


def test_begin_clears_earlier_times(clock: Clock) -> None:
    phases = Phases("cpu")
    with phases("forward"):
        clock.now += 1.0
    phases.begin()
    with phases("loss"):
        clock.now += 2.0
    assert seconds(phases) == {"phase/loss": 2.0}


@pytest.mark.gpu
def test_on_a_gpu_phases_measure_kernels_and_not_their_launch() -> None:
    """Bug: a host clock, which measures a launch in the first phase and all work in the phase that waits."""
    phases = Phases("cuda")
    matrix = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    start = time.perf_counter()
    with phases("work"):
        for _ in range(20):
            matrix = matrix @ matrix / 64
    with phases("idle"):
        pass
    torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    times = seconds(phases)
    assert 0.5 * elapsed < times["phase/work"] < 1.1 * elapsed
    assert times["phase/idle"] < 0.1 * elapsed
