"""Catches work that is shown after it has ended, and work without a total that hides work with one."""

import os
import threading

import pytest

from nemo_opd import progress
from nemo_opd.progress import BARS, current, quiet_libraries, separately, tracked, working
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the work of other tests: a stored exception keeps its frames, and so their loops, alive."""
    monkeypatch.setattr(progress, "_under_way", [])


def test_the_newest_work_with_a_known_end_is_shown() -> None:
    assert current() is None
    with working("loading") as outer:
        assert current() is outer
        with working("reading texts", 10, "texts") as counted, working("parsing"):
            assert current() is counted
        assert current() is outer
    assert current() is None


def test_tracked_items_advance_as_they_are_dealt_with() -> None:
    seen = []
    for _ in tracked([1, 2, 3], "reading", "texts"):
        work = current()
        assert work is not None
        seen.append((work.total, work.look()))
    assert seen == [(3, 0), (3, 1), (3, 2)]
    assert current() is None


def test_an_error_ends_the_work() -> None:
    with pytest.raises(ValueError, match="broken"), working("reading"):
        raise ValueError("broken")
    assert current() is None


def test_work_can_be_measured_from_outside() -> None:
    sizes = iter([10, 20])
    with working("writing", 40, "B", measure=lambda: next(sizes)) as work:
        assert [work.look(), work.look()] == [10, 20]


def test_work_of_several_threads_ends_in_any_order() -> None:
    go, ended = threading.Event(), threading.Event()

    def work_in_thread() -> None:
        with working("other", 5, "texts"):
            go.wait()
        ended.set()

    thread = threading.Thread(target=work_in_thread)
    with working("own", 5, "texts") as main_work:
        thread.start()
        wait_until(lambda: current() is not main_work, "work of the other thread", every_s=0.01)
        go.set()
        assert ended.wait(60)
        assert current() is main_work
    thread.join()


def test_bars_of_libraries_are_off_unless_the_user_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in BARS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(BARS[0], "0")
    quiet_libraries()
    assert [os.environ[name] for name in BARS] == ["0", "1", "1"]


def test_bars_of_a_transformers_that_is_already_imported_are_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: if a script imported transformers before the run, its progress bar for saving a model showed up."""
    from transformers.utils import logging

    for name in BARS:
        monkeypatch.delenv(name, raising=False)
    was_active = logging.is_progress_bar_enabled()
    try:
        logging.enable_progress_bar()
        quiet_libraries()
        assert not logging.is_progress_bar_enabled()
    finally:
        (logging.enable_progress_bar if was_active else logging.disable_progress_bar)()


def test_work_of_an_exception_that_is_kept_is_not_that_of_the_next_run() -> None:
    """Bug: a sweep stores the exception of each run, and with it the unfinished loops."""

    def fail() -> None:
        texts = tracked(range(3), "reading texts", "texts")
        for _ in texts:
            raise KeyError

    errors = []
    for _ in range(2):
        with separately():
            assert current() is None
            with pytest.raises(KeyError) as caught:
                fail()
            errors.append(caught)
            assert current() is not None
    assert current() is None
