"""Catches lines that wrap, control codes in log files, silence, and floods."""

import io
import math
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from nemo_opd.config.run_fields import Console as ConsoleSettings
from nemo_opd.logging.console import ConsoleLogger, _Progression
from nemo_opd.logging.interface import ClosingTable, Score, ScoreRow, amount, change, clock, figure
from tests.logging.synthetic import CLOSING, QUESTIONS, record, summary, validation


def console_output(console: Console, steps: int = 20, interval_s: float = 3600, closing: ClosingTable = CLOSING) -> str:
    logger = ConsoleLogger(ConsoleSettings(interval_s=interval_s), console)
    logger.start(summary(Path("/outputs/demo"), steps), 0)
    logger.log(0, validation(2.0))
    for step in range(1, steps + 1):
        logger.log(step, record(step) | (validation(2.0 - step / 40) if step % 10 == 0 else {}))
    logger.summary(closing)
    logger.close()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_that_measured_nothing_says_so() -> None:
    """Bug: a new user finds no line about the change of the student."""
    line = "measured  nothing: name texts in data.validation"
    text = console_output(Console(file=io.StringIO(), width=120), closing=ClosingTable(None, None))
    assert line in text
    assert "bits per byte" not in text
    assert line not in console_output(Console(file=io.StringIO(), width=120))


def test_validation_marks_the_best_so_far_also_after_nan() -> None:
    console = Console(file=io.StringIO(), width=80)
    logger = ConsoleLogger(ConsoleSettings(), console)
    logger.start(summary(Path("/outputs/demo")), 0)
    for step, bits in enumerate([math.nan, 2.0, 1.5, 1.75, 1.25]):
        logger.log(step, validation(bits))
    lines = [line for line in console.file.getvalue().splitlines() if " val " in line]
    assert [line.endswith("best") for line in lines] == [False, False, True, False, True]


def test_a_warning_stays_under_live_progress() -> None:
    """Bug: a warning in the live line disappears with the next step."""
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    logger = ConsoleLogger(ConsoleSettings(), console)
    logger.start(summary(Path("/outputs/demo"), 2), 0)
    logger.warn("step 1: teacher cross (nan) is not finite")
    logger.log(2, record(2))
    logger.close()
    *_, last = (line for line in console.file.getvalue().splitlines() if "warning:" in line)
    assert last.endswith("warning: step 1: teacher cross (nan) is not finite")


def test_gains_are_on_one_line_at_80_columns() -> None:
    """Bug: a long name of a measure pushes the unit to a second line."""
    start, end = Score(0.28, 0.21, 0.36), Score(0.957, 0.91, 0.98)
    gains = {"student before": Score(0.677, 0.59, 0.76), "teacher phi4mini_instruct": Score(-0.02, -0.06, 0.02)}
    name = "mmlu_pro_5shot/exact_match.custom-extract"
    row = ScoreRow(name, start, end, {"phi4mini_instruct": end}, gains)
    text = console_output(Console(file=io.StringIO(), width=80), closing=ClosingTable(None, None, scores=(row,)))
    assert "+67.7 ± 8.5 points" in text
    assert "teacher phi4mini_instruct" in text


def test_a_mean_that_is_pass_at_1_is_shown_once() -> None:
    """Bugs: half of the table repeats scores; a mean of different rewards is lost."""
    score, different_score = Score(0.3, 0.2, 0.4), Score(0.35, 0.3, 0.4)
    rows = [ScoreRow(f"{name}/pass@1", None, score) for name in ("a", "b")]
    rows += [
        ScoreRow("a/mean@4", None, score),
        ScoreRow("b/mean@4", None, different_score),
        ScoreRow("c/mean@4", None, score),
    ]
    rows_shown = ClosingTable(None, None, scores=tuple(rows)).shown_scores
    assert [row.measure for row in rows_shown] == ["a/pass@1", "b/pass@1", "b/mean@4", "c/mean@4"]


def test_a_long_step_leaves_those_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: the remaining time is 0 while an evaluation takes longer than all remaining steps."""
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progression = _Progression(total=10, step=0)
    for step in range(1, 7):
        now[0] += 10
        progression.advance(step, {})
    now[0] += 4
    assert progression.left == "0:36"
    now[0] += 600
    assert progression.left == "0:30"


def test_the_last_line_of_a_continued_run_says_since_when() -> None:
    """Bug: the total step stands beside time and tokens since the resume."""
    console = Console(file=io.StringIO(), width=80)
    logger = ConsoleLogger(ConsoleSettings(), console)
    logger.start(summary(Path("/outputs/demo"), 20), 18)
    for step in (19, 20):
        logger.log(step, record(step))
    logger.summary(CLOSING)
    assert "step 20; since step 18: 8.19k student tokens, 0:00" in console.file.getvalue()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_plain_output_fits_the_width_and_has_no_control_codes(width: int) -> None:
    text = console_output(Console(file=io.StringIO(), width=width))
    assert "\x1b" not in text
    assert max(len(line) for line in text.splitlines() if not line.startswith(("step ", "  time "))) <= width
    assert all(
        word in text
        for word in ("llama-1b", "2 epochs", "0.01, adamw", "0.674", "2.0000", "1.5000", "-25.0 %", "report")
    )


@pytest.mark.parametrize("width", [20, 80])
def test_a_log_has_all_fields_whatever_the_width(width: int) -> None:
    """Bug: a log of 80 columns loses the learning rate of steps with longer figures."""
    lines = [
        line
        for line in console_output(Console(file=io.StringIO(), width=width), interval_s=0).splitlines()
        if " lr " in line
    ]
    assert len(lines) == 20
    assert all(re.fullmatch(r"step .*  loss .*  lr \S+  s/step \S+.*  left \S+", line) for line in lines)


def test_warnings_of_a_log_are_lines_of_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    """Bugs: a warning is folded into several lines; it is printed to stdout, among the figures."""
    console = Console(file=io.StringIO(), width=40)
    logger = ConsoleLogger(ConsoleSettings(), console)
    logger.start(replace(summary(Path("/outputs/demo")), warnings=(long := "a warning of many words " * 4,)), 0)
    logger.warn("step 1: not finite")
    logger.close()
    assert capsys.readouterr().err.splitlines() == [f"warning: {long}", "warning: step 1: not finite"]
    assert "many words" not in console.file.getvalue()


def test_scores_are_by_measure_and_model() -> None:
    """Bugs: a teacher's score beside the student's name; an empty line for an unknown score."""
    text = console_output(Console(file=io.StringIO(), width=80), closing=QUESTIONS).partition("Questions")[2]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in text.splitlines() if line.startswith("│")]
    assert rows == [
        ["greedy", ""],
        ["student before", "20.0 % (10.0 to 30.0 %)"],
        ["student after", "40.0 % (30.0 to 50.0 %)"],
        ["teacher phi4mini", "90.0 % (80.0 to 95.0 %)"],
        ["pass@4", ""],
        ["student after", "60.0 % (50.0 to 70.0 %)"],
    ]


def test_the_scores_of_each_teacher_have_a_line_where_it_was_asked() -> None:
    console = Console(file=io.StringIO(), width=80)
    logger = ConsoleLogger(ConsoleSettings(), console)
    logger.start(summary(Path("/outputs/demo")), 0)
    scores = {"eval/greedy{}": 0.2, "eval/greedy{}/llama3b": 0.9}
    logger.log(0, {key.format(end): value for key, value in scores.items() for end in ("", "_low", "_high")})
    assert console.file.getvalue().splitlines()[-2:] == [
        "step  0/20  questions  greedy 20.0%",
        "  teacher llama3b  greedy 90.0%",
    ]


def test_plain_lines_come_at_intervals_and_always_first_last_and_validated() -> None:
    lines = console_output(Console(file=io.StringIO(), width=80)).splitlines()
    steps = [line.split("/")[0].split()[-1] for line in lines if line.startswith("step") and " val " not in line]
    validated = [line.split("/")[0].split()[-1] for line in lines if line.startswith("step") and " val " in line]
    assert steps == ["1", "10", "20"]
    assert all("  left " in line for line in lines if "  grad " in line)
    assert validated == ["0", "10", "20"]
    assert (
        sum(line.startswith("step") for line in console_output(Console(file=io.StringIO()), interval_s=0).splitlines())
        == 23
    )


def test_a_line_comes_before_the_wait_for_the_next_step_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: most lines of steps came just after a line about the running step."""
    now = [0.0]
    monkeypatch.setattr("nemo_opd.logging.console.time", SimpleNamespace(monotonic=lambda: now[0]))
    console = Console(file=io.StringIO(), width=80)
    logger = ConsoleLogger(ConsoleSettings(interval_s=10), console)
    logger.start(summary(Path("/outputs/demo")), 0)
    for step in range(1, 20):
        now[0] += 2.5
        logger.log(step, record(step))
    logger.close()
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("step")]
    assert [line.split("/")[0].split()[-1] for line in lines] == ["1", "4", "7", "10", "13", "16", "19"]


def test_shares_of_time_are_printed_once_and_again_when_they_changed() -> None:
    """Bugs: a second line for every step; the last line still shows the first steps' shares."""
    console = Console(file=io.StringIO(), width=80)
    logger = ConsoleLogger(ConsoleSettings(interval_s=0), console)
    logger.start(summary(Path("/outputs/demo")), 0)
    for step in range(1, 21):
        slower = {"perf/teacher_s": 6.0, "perf/step_s": 7.25} if step > 5 else {}
        logger.log(step, record(step) | slower)
    lines = [line for line in console.file.getvalue().splitlines() if line.startswith("  time")]
    # Largest first; 0.75 of 2 s is on the edge between two whole percents.
    assert re.fullmatch(r"  time  teachers 3[78]%  backward 25%  data 12%  forward 12%  loss 6%  other 6%", lines[0])
    assert 2 < len(lines) < 8
    percent = float(re.search(r"teachers (\d+)%", lines[-1]).group(1))
    assert percent == pytest.approx(100 * 6 / 7.25, abs=6)


def test_a_terminal_gets_a_live_bar_that_reaches_the_end() -> None:
    text = console_output(
        Console(file=io.StringIO(), width=80, force_terminal=True, _environ={"TERM": "xterm-256color"})
    )
    assert "20/20" in text
    assert "100%" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h") == 1  # the cursor was hidden and given back


def test_output_stays_possible_where_only_ascii_can_be_written() -> None:
    raw = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    logger = ConsoleLogger(ConsoleSettings(), Console(file=raw, width=80))
    logger.start(summary(Path("/outputs/demo")), 0)
    logger.log(1, record(1) | validation(1.0) | {"train/loss": math.nan})
    logger.summary(CLOSING)
    logger.close()
    raw.flush()
    assert b"loss nan" in raw.buffer.getvalue()


@pytest.mark.parametrize(
    ("form", "value", "text"),
    [
        (figure, 2.0, "2.000"),
        (figure, 0.0, "0.000"),
        (figure, 0.01234, "0.0123"),
        (figure, 1.5e-7, "1.50e-07"),
        (figure, 123456.0, "1.23e+05"),
        (amount, 950.0, "950"),
        (amount, 12345.0, "12.3k"),
        (amount, 4_560_000.0, "4.56M"),
        (clock, 65.0, "1:05"),
        (clock, 7384.0, "2:03:04"),
        (clock, 3 * 86400 + 7200.0, "3d 02:00"),
        (clock, math.nan, "-"),
        (change, -0.123, "-12.3 %"),
        (change, None, ""),
    ],
)
def test_numbers_for_people(form, value, text) -> None:
    assert form(value) == text
