"""Progress on the console: a header, live or plain progress, and tables of the results."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, RenderableColumn, TaskProgressColumn
from rich.table import Table
from rich.text import Text

from nemo_opd.config.run_fields import Console as ConsoleSettings
from nemo_opd.logging.interface import (
    ClosingTable,
    Logger,
    RunSummary,
    Verdict,
    amount,
    bits,
    change,
    clock,
    difference,
    figure,
    is_share,
    score,
)
from nemo_opd.logging.metrics import by_set, shares, step_parts
from nemo_opd.logging.terminal import EARLY, SILENCE_S, Ticker, WorkLine, print_warning, work_line
from nemo_opd.progress import Work, current

_Fields = tuple[tuple[str, str, Callable[[float], str]], ...]
"""Label, metric and format of each value, the most important first; values beyond the width are dropped."""
_TRAINING: _Fields = (
    ("loss", "train/loss", figure),
    ("kd", "train/kd", figure),
    ("ce", "train/ce", figure),
    ("grad", "train/grad_norm", figure),
    ("tok/s", "perf/tokens_per_s", amount),
    ("lr", "train/lr", "{:.2g}".format),
    ("s/step", "perf/step_s", figure),
    ("MFU", "perf/mfu", "{:.0%}".format),
    ("GB", "perf/peak_memory_gb", "{:.1f}".format),
)
_VALIDATION: _Fields = (
    ("bits/byte", "val/bits_per_byte", "{:.4f}".format),
    ("accuracy", "val/accuracy", "{:.4f}".format),
    ("loss", "val/loss", figure),
    ("kd", "val/kd", figure),
    ("ce", "val/ce", figure),
)
_ROLLOUTS: _Fields = (
    ("reward", "rollout/reward", figure),
    ("length", "rollout/response_length", "{:.0f}".format),
    ("cut", "rollout/truncation_rate", "{:.0%}".format),
)
_LEAST_SHARE, _NEWS = 0.005, 0.05
"""Smallest share of a step's time that is shown, and change of a share that prints a new line."""


class ConsoleLogger(Logger):
    """Live progress in a terminal; elsewhere plain lines of any width, at most one every `interval_s` for steps, and
    one on the current work after each `SILENCE_S` without other lines. Warnings then go to stderr.
    """

    def __init__(self, settings: ConsoleSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._live: Live | None = None
        self._ticker: Ticker | None = None

    def start(self, run: RunSummary, step: int) -> None:
        self._run = run
        self._progression = _Progression(run.total_steps, step)
        self._step_time = _StepTime()
        self._best = math.inf
        self._printed = -math.inf
        self._doing = self._next_step(step)
        console = self._console
        is_live = console.is_terminal and not console.is_dumb_terminal
        console.print(_header(run, run.warnings if is_live else (), step))
        if is_live:
            self._start_live(step)
        else:
            for warning in run.warnings:
                self.warn(warning)
            interval_s = max(SILENCE_S, self._settings.interval_s)
            self._ticker = Ticker(lambda: console.print(Text(work_line(current() or self._doing), "dim")), interval_s)

    def _start_live(self, step: int) -> None:
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            RenderableColumn(self._progression),
            expand=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=self._run.total_steps, completed=step)
        self._lines: list[RenderableType] = []
        work = WorkLine(lambda: self._doing)
        self._live = Live(
            get_renderable=lambda: Group(self._bar, *self._lines, work), console=self._console, refresh_per_second=2
        )
        self._live.start()

    def phase(self, name: str) -> None:
        self._doing = Work(name)
        if self._live is None:
            self._print(Text(name, "dim"))

    def warn(self, message: str) -> None:
        if self._live is None:
            print_warning(message)
        else:
            self._print(Text(f"warning: {message}", "yellow"))

    def _print(self, content: RenderableType) -> None:
        if self._ticker is not None:
            self._ticker.touch()
        self._console.print(content, crop=False)

    def _next_step(self, step: int) -> Work:
        return Work(f"in step {self._counted(min(step + 1, self._run.total_steps))}")

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._doing = self._next_step(step)
        self._progression.advance(step, values)
        self._step_time.add(values)
        if any(key.startswith("train/") for key in values):
            self._show_training(step, values)
        if any(key.startswith("val/") for key in values):
            self._print_validation(step, values)
        if any(key.startswith("eval/") for key in values):
            self._print_questions(step, values)

    def _show_training(self, step: int, values: Mapping[str, float]) -> None:
        # a term without a weight is 0
        fields = tuple(field for field in _TRAINING if field[0] != "ce" or values.get(field[1]))
        if "rollout/response_length" in values:
            fields = (*fields[:2], *_ROLLOUTS, *fields[2:])
        if self._live is not None:
            self._bar.update(self._task, completed=step)
            self._lines = [_Line(Text(), fields, values), self._step_time.line()]
            return
        # early enough to avoid a long silence before the next step's line
        interval_s = EARLY * self._settings.interval_s - (self._progression.step_s or 0.0)
        is_due = time.monotonic() - self._printed >= interval_s
        if is_due or step == self._run.total_steps or "val/loss" in values:
            self._printed = time.monotonic()
            lead, tail = Text(f"step {self._counted(step)}"), f"  left {self._progression.left}"
            self._print(_Line(lead, fields, values, tail))
            if self._step_time.has_news():
                self._print(self._step_time.line())

    def _print_validation(self, step: int, values: Mapping[str, float]) -> None:
        bits = values.get("val/bits_per_byte", math.nan)
        better, first = bits < self._best, self._best == math.inf
        if better:
            self._best = bits
        lead = Text.assemble(f"step {self._counted(step)}  ", ("val", "bold green" if better else "bold yellow"))
        self._print(_Line(lead, _VALIDATION, values, "  best" if better and not first else ""))

    def _print_questions(self, step: int, values: Mapping[str, float]) -> None:
        for name, scores in by_set(values).items():
            student_fields = tuple((measure, key, partial(_score_text, measure)) for measure, key in scores)
            lead = Text.assemble(f"step {self._counted(step)}  ", (name or "questions", "bold green"))
            self._print(_Line(lead, student_fields, values))
            for teacher in self._run.teachers:
                fields = tuple((label, f"{key}/{teacher.name}", form) for label, key, form in student_fields)
                if any(key in values for _, key, _ in fields):
                    self._print(_Line(Text(f"  teacher {teacher.name}"), fields, values))

    def _counted(self, step: int) -> str:
        total = str(self._run.total_steps)
        return f"{step:>{len(total)}}/{total}"

    def summary(self, closing: ClosingTable) -> None:
        self.end_display()
        if closing.verdict.sentences:
            self._print(_verdict_lines(closing.verdict))
        if closing.rows:
            self._print(_validation_table(closing))
        if closing.scores:
            self._print(_score_table(closing))
        progression, output_dir = self._progression, self._run.output_dir
        tokens, elapsed = amount(progression.tokens), clock(progression.elapsed_s)
        since = f"; since step {progression.start:,}: " if progression.start else ", "
        done = Table.grid(padding=(0, 2))
        done.add_row("[dim]done[/]", f"step {progression.step:,}{since}{tokens} student tokens, {elapsed}")
        if closing.before is closing.after is None and not closing.scores:
            done.add_row("[dim]measured[/]", "nothing: name texts in data.validation, or questions in evaluation")
        model = str(output_dir / "final") if closing.is_exported else "not exported, as it is worse than at the start"
        done.add_row("[dim]model[/]", Text(model, overflow="fold"))
        if (best := closing.best) is not None:
            origin = f", of step {best.step:,} with {best.metric} {best.value:.4g}"
            done.add_row("[dim]best[/]", Text(f"{output_dir / 'best'}{origin}", overflow="fold"))
        done.add_row("[dim]report[/]", Text(str(output_dir / "report" / "report.html"), overflow="fold"))
        self._print(Padding(done, (0, 0, 0, 1)))

    def close(self) -> None:
        self.end_display()
        if self._ticker is not None:
            self._ticker.close()

    def end_display(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def _score_text(measure: str, value: float) -> str:
    return f"{value:.1%}" if is_share(measure, value) else figure(value)


class _Progression:
    """Steps and time of a run, and the remaining time at the pace of recent steps."""

    def __init__(self, total: int, step: int) -> None:
        self.total = total
        self.start = self.step = step
        self.tokens = 0.0
        self.step_s: float | None = None
        """Seconds per step, averaged over recent steps; None before the second step."""
        self._began = time.monotonic()
        self._moved: float | None = None

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        # time before the first record, such as loading models, is not part of the pace
        if step > self.step and self._moved is not None:
            # includes validation and checkpoints between steps, which will recur
            pace = (now - self._moved) / (step - self.step)
            self.step_s = pace if self.step_s is None else 0.9 * self.step_s + 0.1 * pace
        self._moved = now
        self.step = step
        self.tokens += values.get("train/student_tokens", 0.0)

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began

    @property
    def left(self) -> str:
        if self.step_s is None or self._moved is None:
            return "-"
        # a slow step, such as one with an evaluation, must not reduce the time of the remaining ones
        gone = min(time.monotonic() - self._moved, self.step_s)
        return clock(max(0.0, self.step_s * (self.total - self.step) - gone))

    def __rich__(self) -> Text:
        return Text.assemble(("elapsed ", "dim"), clock(self.elapsed_s), ("  left ", "dim"), self.left)


class _Line:
    """Labelled values on one line, in a terminal as many as the width allows."""

    def __init__(self, lead: Text, fields: _Fields, values: Mapping[str, float], tail: str = "") -> None:
        self._lead = lead
        self._fields = [(name, values[key], form) for name, key, form in fields if key in values]
        self._tail = tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._lead.copy()
        room = options.max_width - len(self._tail) if console.is_terminal else math.inf
        for name, value, form in self._fields:
            style = "bold" if math.isfinite(value) else "bold red"
            field = Text.assemble("  ", (name, "dim"), " ", (form(value), style))
            if line.cell_len + field.cell_len > room:
                break
            line.append_text(field)
        line.append(self._tail, "dim")
        line.no_wrap, line.overflow = True, "ignore"
        yield line


class _StepTime:
    """Shares of the parts of recent steps' time."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds: dict[str, float] = {}
        self._printed: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        parts = step_parts(values)
        if not parts:
            return
        self._num_steps += 1
        # The first step includes one-time setup, so it does not enter the average.
        average = parts if self._num_steps <= 2 else self._seconds
        self._seconds = {name: 0.7 * average.get(name, 0.0) + 0.3 * seconds for name, seconds in parts.items()}

    def line(self) -> _Line:
        """Return the shares as a line, the largest first."""
        now = shares(self._seconds)
        names = sorted((name for name in now if now[name] >= _LEAST_SHARE), key=lambda name: -now[name])
        return _Line(Text("  time", "dim"), tuple((name, name, "{:.0%}".format) for name in names), now)

    def has_news(self) -> bool:
        """Return whether a share has changed noticeably since this last returned True."""
        now = shares(self._seconds)
        if all(abs(share - self._printed.get(name, 0.0)) < _NEWS for name, share in now.items()):
            return False
        self._printed = now
        return True


def _header(run: RunSummary, warnings: Sequence[str], step: int) -> Panel:
    """Return the facts of a run.

    step: last step of the run that is continued; 0 for a new run.
    """
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim", no_wrap=True)
    facts.add_column(overflow="fold")
    facts.add_row("student", Text(run.student, "bold"))
    if run.teachers:
        facts.add_row("teachers" if len(run.teachers) > 1 else "teacher", _teacher_lines(run))
    else:
        facts.add_row("teachers", Text("none, only cross-entropy"))
    facts.add_row("device", Text(f"{run.device}, {run.layout}"))
    continued = f", continued after step {step:,}" if step else ""
    for label, value in run.choices.items():
        facts.add_row(label, Text(f"{value}{continued}" if label == "steps" else value))
    facts.add_row("data", Text(run.data))
    facts.add_row("batch", Text(f"{run.batch}, {run.tokens_at_a_time:,} tokens at a time per rank"))
    facts.add_row("output", Text(str(run.output_dir)))
    for warning in warnings:
        facts.add_row("warning", Text(warning, "yellow"))
    title = Text.assemble(("nemo_opd", "bold cyan"), " ", run.name)
    return Panel(facts, title=title, title_align="left", border_style="cyan", padding=(0, 1))


def _teacher_lines(run: RunSummary) -> Group:
    lines: list[RenderableType] = []
    for teacher in run.teachers:
        facts = f"weight {teacher.weight:g}, {teacher.type}, {teacher.loss}"
        details = [Text(fact, "dim") for fact in (facts, *teacher.coverage)]
        lines.append(Text.assemble((teacher.name, "bold"), f"  {teacher.model}"))
        lines += [Padding(detail, (0, 0, 0, 2)) for detail in details]
    return Group(*lines)


def _verdict_lines(verdict: Verdict) -> Padding:
    lines = [Text(sentence, "bold") for sentence in verdict.sentences]
    remarks = [Text(f"note: {remark}", "yellow") for remark in verdict.remarks]
    return Padding(Group(*lines, *remarks), (1, 0, 1, 1))


def _validation_table(closing: ClosingTable) -> Table:
    """Return the bits per byte of `ClosingTable.rows`."""
    table = titled_table("Validation")
    table.add_column("model", overflow="fold")
    table.add_column("bits per byte", justify="right", no_wrap=True)
    if closing.teachers:
        table.add_column("shared bytes", justify="right", no_wrap=True)
    table.add_column("vs start", justify="right", no_wrap=True)
    table.add_column("", style="dim", overflow="fold")
    for row in closing.rows:
        style = "bold green" if row is closing.after else ""
        values = [row.bits_per_byte, row.shared_bits_per_byte] if closing.teachers else [row.bits_per_byte]
        figures = ["-" if value is None else bits(value) for value in values]
        table.add_row(Text(row.name), *figures, change(closing.change(row)), Text(row.note), style=style)
    return table


def _score_table(closing: ClosingTable) -> Table:
    """Return scores with confidence intervals: of the student before and after, and of its teachers.

    The last column is the final student's gain over each other model, on the same questions.
    """
    table = titled_table("Questions")
    table.add_column("measure, model", overflow="fold")
    table.add_column("score", justify="right", no_wrap=True)
    is_compared = any(row.differences for row in closing.scores)
    if is_compared:
        table.add_column("student after\nis better by", justify="right")
    for row in closing.shown_scores:
        table.add_row(Text(row.measure, "bold"))
        for model, model_score in row.by_model.items():
            style = "bold green" if model_score is row.after else ""
            gain = row.differences.get(model)
            gain_text = "" if gain is None else difference(*gain, is_share=row.is_share)
            text = Text(score(*model_score, is_share=row.is_share), style)
            table.add_row(Padding(Text(model, style), (0, 0, 0, 2)), text, *([gain_text] if is_compared else []))
        table.add_section()
    return table


def titled_table(title: str) -> Table:
    """Return an empty table in the common style."""
    return Table(title=title, title_justify="left", title_style="bold", border_style="dim")
