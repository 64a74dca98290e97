"""Signals to a driver and to its processes on Ray. Answers to them without Ray: training/test_signals."""

import time
from pathlib import Path

import pytest

from nemo_opd.training.interrupt import ECHO_S
from tests.cluster.ray import driver
from tests.training.launch import Run, assert_a_signal_to_all_ends, start
from tests.waiting import wait_until

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


def test_ctrl_c_is_for_the_driver_and_the_second_ends_all(tmp_path: Path) -> None:
    run = at_work(tmp_path)
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
