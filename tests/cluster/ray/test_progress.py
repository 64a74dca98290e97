"""Progress of workers: it reaches the driver, ends with their work, and cannot fail the run."""

import threading
import time
from collections.abc import Callable

import pytest
from ray.exceptions import RayActorError
from torch.distributed import HashStore

from nemo_opd import progress
from nemo_opd.cluster.ray import calls as worker_progress
from nemo_opd.cluster.ray.calls import KEY, ProgressMonitor, ProgressReporter, encoded
from nemo_opd.progress import Work, current, working
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clear work that an error kept by another test may hold."""
    monkeypatch.setattr(progress, "_under_way", [])


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_progress, "_INTERVAL_S", 0.01)


def seen(monitor: ProgressMonitor, is_expected: Callable[[Work | None], bool]) -> Work | None:
    """Poll until the displayed work is as expected, and return it."""

    def look() -> bool:
        monitor.look()
        return is_expected(current())

    wait_until(look, "what the group does", every_s=0.01)
    return current()


def test_what_a_worker_does_is_told_until_it_is_done() -> None:
    store = HashStore()
    reporter = ProgressReporter(lambda: store)
    with working("reading weights", 40, "tensors") as work:
        work.advance(10)
        wait_until(lambda: store.check([KEY]) and b"reading weights" in store.get(KEY), "a word", every_s=0.01)
    wait_until(lambda: store.get(KEY) == b"null", "its end", every_s=0.01)
    reporter.close()


def test_the_driver_shows_it_under_the_name_of_the_group() -> None:
    store = HashStore()
    monitor = ProgressMonitor("student", lambda: store)
    monitor.look()
    assert current() is None
    store.set(KEY, encoded(Work("reading weights", 40, "tensors", 10)))
    work = seen(monitor, lambda work: work is not None)
    assert work is not None
    assert (work.name, work.total, work.done) == ("student: reading weights", 40, 10)
    store.set(KEY, encoded(Work("reading weights", 40, "tensors", 30)))
    assert seen(monitor, lambda work: work is not None and work.done == 30) is work
    store.set(KEY, encoded(None))
    seen(monitor, lambda work: work is None)


def test_its_time_is_the_groups_also_when_it_is_done_again() -> None:
    """Bug: rates count from the driver's first look, ten times the true rate, or include earlier work."""
    store = HashStore()
    monitor = ProgressMonitor("student", lambda: store)
    for begun in (time.monotonic() - 100, time.monotonic() - 3):
        store.set(KEY, encoded(Work("reading weights", 40, "tensors", 10, begun)))
        seen(monitor, lambda work, begun=begun: work is not None and abs(work.started - begun) < 1)


def test_what_was_shown_is_gone_with_the_call() -> None:
    store = HashStore()
    store.set(KEY, encoded(Work("sampling", 4, "sequences")))
    monitor = ProgressMonitor("student", lambda: store)
    seen(monitor, lambda work: work is not None)
    monitor.clear()
    assert current() is None


def test_a_group_that_never_answers_is_not_waited_for() -> None:
    """Bug: the driver waits for a stopped worker and misses its time limit and Ctrl-C."""
    answer = threading.Event()

    def stopped() -> None:
        answer.wait()

    monitor = ProgressMonitor("student", stopped)
    monitor.look()
    monitor.look()
    assert current() is None
    answer.set()


@pytest.mark.parametrize("error", [RuntimeError, ValueError, RayActorError])
def test_a_group_that_is_not_there_yet_or_no_more_shows_nothing(error: type[Exception]) -> None:
    """Bug: the display reports a worker's death before the call does."""
    calls: list[int] = []

    def gone() -> None:
        calls.append(1)
        raise error

    ProgressMonitor("student", lambda: None).look()
    monitor = ProgressMonitor("student", gone)
    monitor.look()
    assert monitor._thread is not None
    monitor._thread.join()
    monitor.look()
    assert (len(calls), current()) == (1, None)
