"""Signals to a driver and its processes on Ray; training/test_signals has the tests without Ray."""

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from nemo_opd.training.interrupt import ECHO_S
from tests.cluster.ray import driver
from tests.training.launch import Run, assert_a_signal_to_all_ends, start
from tests.waiting import ENOUGH_S, wait_until

pytestmark = pytest.mark.ray


def started(case: str, folder: Path) -> Run:
    return start(folder / "run", [], script=Path(driver.__file__), arguments=[case])


def at_work(folder: Path) -> Run:
    run = started("works", folder)
    wait_until((run.output_dir / driver.READY).exists, "first call")
    return run


def test_sigterm_while_models_load_ends_the_run_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    run = started("loads", tmp_path)
    run.wait_for_workers()
    run.process.terminate()
    assert run.end() == 130
    assert run.last_line == "error: interrupted"
    assert "SIGTERM received" not in run.output, "the stack of C++ that Ray dumps"
    assert run.leftovers() == []


@pytest.fixture(scope="session")
def killed_runs() -> Iterator[list[Run]]:
    """Check at the end that no process of them is left: Ray's agents try for a minute to report a dead raylet."""
    runs: list[Run] = []
    yield runs
    for run in runs:
        assert run.leftovers(is_killed=True, within_s=ENOUGH_S) == []


@pytest.fixture(scope="module")
def killed(killed_runs: list[Run], tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run whose driver was killed with SIGKILL during a call."""
    run = at_work(tmp_path_factory.mktemp("killed"))
    assert run.workers()
    run.process.kill()
    assert run.end() == -signal.SIGKILL
    killed_runs.append(run)
    return run


def test_the_ranks_of_a_killed_driver_end(killed: Run) -> None:
    wait_until(lambda: not killed.workers(), "end of the workers")


def test_ctrl_c_is_for_the_driver_and_the_second_ends_all(killed: Run, tmp_path: Path) -> None:
    """Bugs: Ctrl-C ends the workers at once; the next run does not remove the killed run's folders."""
    run = at_work(tmp_path)
    assert killed.ray_folders
    assert not any(folder.exists() for folder in killed.ray_folders)
    alive = {process.pid for process in run.processes()}
    run.interrupt()
    wait_until(lambda: "interrupt again to end now" in run.output, "answer")
    time.sleep(ECHO_S)
    assert run.process.returncode is None, "the first one waits for the step to end"
    assert {process.pid for process in run.processes()} >= alive
    run.interrupt()
    assert run.end() == 130
    assert run.leftovers() == []


def test_signal_to_all_processes_ends_the_run_soon(tmp_path: Path) -> None:
    assert_a_signal_to_all_ends(at_work(tmp_path))
