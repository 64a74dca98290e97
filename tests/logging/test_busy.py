"""Catches silence outside a terminal, lines after the end, and a thread that outlives its work."""

import io
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from nemo_opd import progress
from nemo_opd.config.run_fields import Console as ConsoleSettings
from nemo_opd.logging import console as console_module
from nemo_opd.logging.console import ConsoleLogger
from nemo_opd.logging.terminal import Ticker, WorkLine, busy, work_line
from nemo_opd.progress import Work, working
from tests.logging.synthetic import record, summary
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def nothing_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the work of other tests: a stored exception keeps its frames, and so their loops, alive."""
    monkeypatch.setattr(progress, "_under_way", [])


def test_a_ticker_prints_until_it_is_closed() -> None:
    ticks: list[int] = []
    with Ticker(lambda: ticks.append(1), 0.01) as ticker:
        wait_until(lambda: len(ticks) >= 3, "third line", every_s=0.01)
    assert not ticker._thread.is_alive()


def test_a_closed_pipe_ends_a_ticker_and_is_raised_to_the_caller() -> None:
    """Bugs: a thread's traceback within a run's output; no error although stdout is closed."""

    def fail() -> None:
        raise BrokenPipeError

    ticker = Ticker(fail, 0.01)
    wait_until(lambda: not ticker._thread.is_alive(), "end of the thread", every_s=0.01)
    with pytest.raises(BrokenPipeError):
        ticker.touch()
    ticker.close()


def test_other_output_restarts_the_interval() -> None:
    ticks: list[int] = []
    with Ticker(lambda: ticks.append(1), 3600) as ticker:
        ticker._due = 0.0
        ticker.touch()
        assert ticker._due > time.monotonic() + 3000
    assert ticks == []


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ConsoleLogger, io.StringIO]]:
    """Yield a logger outside a terminal that prints the current work every 10 ms."""
    monkeypatch.setattr(console_module, "SILENCE_S", 0.01)
    output = io.StringIO()
    logger = ConsoleLogger(ConsoleSettings(interval_s=0), Console(file=output, width=80))
    logger.start(summary(Path("/outputs/demo")), 0)
    yield logger, output
    logger.close()


def test_a_long_phase_is_not_silent(impatient: tuple[ConsoleLogger, io.StringIO]) -> None:
    """Bug: a single line in more than 100 seconds while models load."""
    logger, output = impatient
    logger.phase("loading models")
    wait_until(lambda: output.getvalue().count("loading models") >= 3, "third line", every_s=0.01)
    with working("reading weights", 40, "tensors") as work:
        work.advance(10)
        wait_until(lambda: "reading weights  10/40 tensors" in output.getvalue(), "its progress", every_s=0.01)
    line = next(line for line in output.getvalue().splitlines() if "10/40" in line)
    assert "/s" in line
    assert "  left " in line


def test_a_long_step_is_named(impatient: tuple[ConsoleLogger, io.StringIO]) -> None:
    logger, output = impatient
    logger.log(3, record(3))
    wait_until(lambda: "in step  4/20" in output.getvalue(), "line in the step", every_s=0.01)


def test_a_terminal_shows_work_below_the_bar() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    logger = ConsoleLogger(ConsoleSettings(), console)
    logger.start(summary(Path("/outputs/demo")), 0)
    logger.phase("loading models")
    with working("reading weights", 40, "tensors") as work:
        work.started -= 10
        work.advance(10)
        logger._live.refresh()
    logger.close()
    assert "reading weights  10/40 tensors" in console.file.getvalue()


def test_work_outside_a_terminal_is_printed_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with busy("checking settings"):
        assert capsys.readouterr().out == "checking settings\n"


@pytest.mark.parametrize(
    ("work", "line"),
    [
        (Work("loading"), "loading  0:10"),
        (Work("reading", 40, "texts"), "reading  0/40 texts  0:10"),
        (Work("reading", 40, "texts", 10), "reading  10/40 texts  1.000/s  0:10  left 0:30"),
        (Work("reading", 2_000_000, "texts", 1_000_000), "reading  1.00M/2.00M texts  100k/s  0:10  left 0:10"),
        (Work("writing", None, "B", 2_500_000), "writing  2.50M B  250k/s  0:10"),
        (Work("writing", 10, "B", 20), "writing  20/10 B  2.000/s  0:10  left 0:00"),
    ],
)
def test_work_as_a_line(work: Work, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Work, "elapsed_s", 10.0)
    assert work_line(work) == line


@pytest.mark.parametrize(
    ("around", "line"),
    [
        ("asking the student", "asking the student: sampling  1/4 sequences"),
        ("sampling at the start", "sampling  1/4 sequences"),
    ],
)
def test_a_line_names_the_enclosing_work(around: str, line: str) -> None:
    """Bug: the line does not say which model samples, and why."""
    console = Console(file=io.StringIO(), width=120)
    with working("sampling", 4, "sequences") as work:
        work.advance()
        work.started -= 60
        console.print(WorkLine(lambda: Work(around)))
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().strip().startswith(line)
