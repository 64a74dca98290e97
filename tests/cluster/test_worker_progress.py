"""Catches progress of workers that never arrives, that stays when they are done, or that fails the run."""

import pytest
from torch.distributed import HashStore

from nemo_opd import progress
from nemo_opd.cluster import worker_progress
from nemo_opd.cluster.worker_progress import KEY, Teller, Watch, encoded
from nemo_opd.progress import Work, current, working
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that another test keeps holds the loops that it left, and their work."""
    monkeypatch.setattr(progress, "_under_way", [])


def test_what_a_worker_does_is_told_until_it_is_done(monkeypatch) -> None:
    monkeypatch.setattr(worker_progress, "TOLD_EVERY_S", 0.01)
    store = HashStore()
    teller = Teller(lambda: store)
    with working("reading weights", 40, "tensors") as work:
        work.advance(10)
        wait_until(lambda: store.check([KEY]) and store.get(KEY) == encoded(work).encode(), "a word", every_s=0.01)
    wait_until(lambda: store.get(KEY) == b"null", "its end", every_s=0.01)
    teller.close()


def test_the_driver_shows_it_under_the_name_of_the_group() -> None:
    store = HashStore()
    watch = Watch("student", lambda: store)
    watch.look()
    assert current() is None
    store.set(KEY, encoded(Work("reading weights", 40, "tensors", 10)))
    watch.look()
    shown = current()
    assert shown is not None
    assert (shown.name, shown.total, shown.done) == ("student: reading weights", 40, 10)
    store.set(KEY, encoded(Work("reading weights", 40, "tensors", 30)))
    watch.look()
    assert current() is shown
    assert shown.done == 30
    store.set(KEY, encoded(None))
    watch.look()
    assert current() is None


def test_what_was_shown_is_gone_with_the_call() -> None:
    store = HashStore()
    store.set(KEY, encoded(Work("sampling", 4, "sequences")))
    watch = Watch("student", lambda: store)
    watch.look()
    watch.clear()
    assert current() is None


def test_a_group_that_is_not_there_yet_or_no_more_shows_nothing() -> None:
    """Bug: a worker that dies is reported by the display and not by the call."""
    calls: list[int] = []

    def gone():
        calls.append(1)
        raise RuntimeError("connection reset by peer")

    Watch("student", lambda: None).look()
    watch = Watch("student", gone)
    watch.look()
    watch.look()
    assert (len(calls), current()) == (1, None)
