"""Runs that fail or hang end with one clear last line, a non-zero status, and no leftovers."""

import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from nemo_opd.checkpoint.run_directory import RunLock
from nemo_opd.errors import ConfigError
from nemo_opd.training import interrupt as interrupt_module
from nemo_opd.training.interrupt import ECHO_S, Interrupt, SignalDebouncer, TimeLimit, interruptible
from nemo_opd.training.session import Session
from tests.tiny import Tiny
from tests.training.conftest import FAULTY
from tests.training.launch import Run, start
from tests.waiting import ENOUGH_S, wait_until

BAD_STEP = 3
WITHOUT_VALIDATION = ("data.validation.arrow_files=[]", "data.validation.max_samples=null")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture
def heeds_hangups() -> Iterator[None]:
    """Restore the default handler of SIGHUP, in case the tests run under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, previous)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """A function that advances the clock until the next signal is not an echo of the last, with no signal before."""
    now = 0.0

    def wait() -> None:
        nonlocal now
        now += ECHO_S

    monkeypatch.setattr(interrupt_module, "_echoes", SignalDebouncer())
    monkeypatch.setattr(interrupt_module.time, "monotonic", lambda: now)
    return wait


@pytest.mark.usefixtures("heeds_hangups")
@pytest.mark.parametrize("first", SIGNALS)
@pytest.mark.parametrize("second", SIGNALS)
def test_the_first_signal_requests_an_end_and_the_second_aborts(
    first: signal.Signals, second: signal.Signals, later: Callable[[], None]
) -> None:
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    answers: queue.Queue[str] = queue.Queue()
    with Interrupt(answers.put) as interrupt:
        assert not interrupt.requested
        os.kill(os.getpid(), first)
        assert interrupt.requested
        assert answers.get(timeout=ENOUGH_S) == "ending after this step; interrupt again to end now"
        later()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), second)
        interrupt.requested, interrupt.effect = False, "the run finishes"
        later()
        os.kill(os.getpid(), first)
        assert answers.get(timeout=ENOUGH_S) == "the run finishes; interrupt again to end now"
    assert answers.empty()
    assert {number: signal.getsignal(number) for number in SIGNALS} == handlers


@pytest.mark.usefixtures("later")
def test_a_signal_to_the_process_and_to_its_group_is_one() -> None:
    """Bug: a signal that `timeout` or `uv run` sends several times at once counts as a second one and aborts."""
    with interruptible():
        with Interrupt(lambda _: None) as interrupt:
            for _ in range(3):
                os.kill(os.getpid(), signal.SIGTERM)
            assert interrupt.requested
        os.kill(os.getpid(), signal.SIGTERM)


def test_while_a_run_starts_the_first_signal_ends_it(later: Callable[[], None]) -> None:
    with interruptible():
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            later()


def test_under_nohup_a_closed_terminal_is_ignored() -> None:
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with Interrupt(lambda _: None) as interrupt, interruptible():
            os.kill(os.getpid(), signal.SIGHUP)
        assert not interrupt.requested
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, previous)


@pytest.mark.nightly
def test_sigterm_while_models_load_ends_the_run_at_once_and_leaves_nothing(tiny: Tiny, tmp_path: Path) -> None:
    """Ranks without models: cluster/ray/test_signals."""
    run = start(tmp_path / "run", tiny.overrides(*WITHOUT_VALIDATION, teachers=1))
    run.wait_for_workers()
    run.process.terminate()
    assert run.end() == 130
    assert run.last_line == "error: interrupted; nothing was saved since it started"
    assert "SIGTERM received" not in run.output, "the stack of C++ that Ray dumps"
    assert run.leftovers() == []


@pytest.mark.world
def test_failing_teacher_ends_the_run_with_its_error(tiny: Tiny, tmp_path: Path) -> None:
    """Bug: the error is lost, or the loader's process stays."""
    run = faulty("teacher_raises", tiny, tmp_path, "data.num_workers=1", "cluster.launcher=local")
    run.wait_for_step(1)
    run.processes()
    assert run.end() == 1
    assert run.last_line == (
        "error: teacher cross rank 0 failed: RuntimeError: the teacher has left the room (while reading a batch (step "
        "3))"
    )
    assert "Traceback (most recent call last)" in run.output
    assert "in forward" in run.output
    assert [record["step"] for record in run.metrics] == [1, 2], "what was done before is kept"
    assert run.leftovers() == []


@pytest.mark.world
def test_second_interrupt_ends_a_run_that_hangs_and_without_kd_weight_no_teacher_runs(
    tiny: Tiny, tmp_path: Path
) -> None:
    """One run checks three things: the second interrupt, kd_weight=0, and the lock on its directory."""
    run = faulty("student_hangs", tiny, tmp_path, "loss.kd_weight=0", "cluster.launcher=local")
    assert run.wait_for_hang() == run.process.pid
    assert [record["step"] for record in run.metrics] == [1, 2]
    for record in run.metrics:
        assert not [
            key for key in record if key.startswith(("train/kd", "perf/teacher_s/")) and key != "train/kd_scale"
        ]
        assert record["train/loss"] == record["train/ce"]
    with pytest.raises(ConfigError, match=f"in use by process {run.process.pid} "):
        RunLock(run.output_dir)
    run.interrupt()
    wait_until(lambda: "ending after this step; interrupt again to end now" in run.output, "answer")
    time.sleep(ECHO_S)
    assert run.process.returncode is None, "the first one waits for the step to end"
    run.interrupt()
    assert run.end() == 130
    assert run.last_line == "error: interrupted; there is no checkpoint yet, so there is nothing to continue"
    assert run.leftovers() == []


def faulty(fault: str, tiny: Tiny, folder: Path, *overrides: str) -> Run:
    arguments = tiny.overrides(*WITHOUT_VALIDATION, "evaluation=null", *overrides, teachers=1)
    return start(folder / "run", arguments, script=FAULTY, arguments=[fault, str(BAD_STEP)])


def test_a_signal_in_the_validation_before_the_first_step_ends_it_at_the_next_batch() -> None:
    """Bug: a run that has nothing to save validates student and teachers for minutes before it ends."""
    read: list[int] = []
    session, interrupt = object.__new__(Session), SimpleNamespace(requested=False)

    def evaluate(batch: int) -> dict[str, Any]:
        read.append(batch)
        interrupt.requested = len(read) == 2
        return {}

    data = SimpleNamespace(validation=range(5), validation_batches=lambda size: iter(range(5)))
    vars(session).update(
        step=0,
        interrupt=interrupt,
        loggers=Mock(),
        plan=SimpleNamespace(data=data),
        config=SimpleNamespace(train=SimpleNamespace(global_batch_size=1), active_teachers=()),
        models=SimpleNamespace(evaluate=evaluate),
        time_limit=TimeLimit(None, 0),
    )
    session.measure_start()
    assert read == [0, 1]
    session.loggers.log.assert_not_called()  # type: ignore[attr-defined]
