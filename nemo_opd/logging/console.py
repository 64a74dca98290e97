"""Progress for a person: a header, live or plain progress, and the closing table."""

import math
import time
from collections.abc import Callable, Mapping

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.padding import Padding
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TaskProgressColumn
from rich.table import Table
from rich.text import Text

from nemo_opd.config.logging import Console as ConsoleSettings
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary
from nemo_opd.logging.formats import amount, clock, figure
from nemo_opd.logging.step_time import shares, step_parts
from nemo_opd.logging.tables import closing_table, header, score_table
from nemo_opd.logging.ticker import EARLY, Ticker
from nemo_opd.logging.work_line import WorkLine, work_line
from nemo_opd.progress import Work, current

Fields = tuple[tuple[str, str, Callable[[float], str]], ...]

# Most wanted first: what the width does not hold is left out from the end.
TRAINING: Fields = (
    ("loss", "train/loss", figure),
    ("kd", "train/kd", figure),
    ("ce", "train/ce", figure),
    ("grad", "train/grad_norm", figure),
    ("tok/s", "perf/tokens_per_s", amount),
    ("lr", "train/lr", "{:.2g}".format),
    ("s/step", "perf/step_s", figure),
    ("GB", "perf/peak_memory_gb", "{:.1f}".format),
)
VALIDATION: Fields = (
    ("bits/byte", "val/bits_per_byte", "{:.4f}".format),
    ("accuracy", "val/accuracy", "{:.4f}".format),
    ("loss", "val/loss", figure),
    ("kd", "val/kd", figure),
    ("ce", "val/ce", figure),
)

ROLLOUTS: Fields = (
    ("reward", "rollout/reward", figure),
    ("length", "rollout/response_length", "{:.0f}".format),
    ("cut", "rollout/truncation_rate", "{:.0%}".format),
)
"""Shown before what every run has."""
EVALUATION: Fields = tuple(
    (name, f"eval/{name}", "{:.1%}".format)
    for name in ("greedy", "pass@1", "pass@2", "pass@4", "pass@8", "pass@16", "maj@8", "maj@16")
)

LEAST_INTERVAL_S = 1.0
"""Between lines on work that goes on, however short the interval of the steps' lines is."""
LEAST_SHARE, NEWS = 0.005, 0.05
"""Of a step's time: what is shown at all, and a change that is worth a line."""


def shown_fields(values: Mapping[str, float]) -> Fields:
    """Of a training step, the most wanted first."""
    # a term without a weight is 0
    training = tuple(field for field in TRAINING if field[0] != "ce" or values.get(field[1]))
    return (*training[:2], *ROLLOUTS, *training[2:]) if "rollout/response_length" in values else training


class Line:
    """Named values on one line, as many as the width holds."""

    def __init__(self, lead: Text, fields: Fields, values: Mapping[str, float], tail: str = "") -> None:
        self._lead = lead
        self._fields = [(name, values[key], form) for name, key, form in fields if key in values]
        self._tail = tail

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        line = self._lead.copy()
        room = options.max_width - len(self._tail)
        for name, value, form in self._fields:
            style = "bold" if math.isfinite(value) else "bold red"
            field = Text.assemble("  ", (name, "dim"), " ", (form(value), style))
            if line.cell_len + field.cell_len > room:
                break
            line.append_text(field)
        line.append(self._tail, "dim")
        line.no_wrap = True
        yield line


class StepTime:
    """Where the time of recent steps goes."""

    def __init__(self) -> None:
        self._num_steps = 0
        self._seconds: dict[str, float] = {}
        self._told: dict[str, float] = {}

    def add(self, values: Mapping[str, float]) -> None:
        parts = step_parts(values)
        if not parts:
            return
        self._num_steps += 1
        # The first step sets up what later ones find ready, and says nothing about them.
        known = parts if self._num_steps <= 2 else self._seconds
        self._seconds = {name: 0.7 * known.get(name, 0.0) + 0.3 * seconds for name, seconds in parts.items()}

    def line(self) -> Line:
        """Shares of the step, the largest first."""
        now = shares(self._seconds)
        shown = sorted((name for name in now if now[name] >= LEAST_SHARE), key=lambda name: -now[name])
        return Line(Text("  time", "dim"), tuple((name, name, "{:.0%}".format) for name in shown), now)

    def has_news(self) -> bool:
        """Whether a share moved since this was last said."""
        now = shares(self._seconds)
        if all(abs(share - self._told.get(name, 0.0)) < NEWS for name, share in now.items()):
            return False
        self._told = now
        return True


class Progression:
    """How far a run is, and when it will end at the pace of its recent steps."""

    def __init__(self, total: int, step: int) -> None:
        self.total = total
        self.step = step
        self.tokens = 0.0
        self._start = time.monotonic()
        self._moved: float | None = None
        self._step_s: float | None = None

    def advance(self, step: int, values: Mapping[str, float]) -> None:
        now = time.monotonic()
        # what happens before the first record, such as loading models, says nothing about the pace
        if step > self.step and self._moved is not None:
            # validation and checkpoints between steps count too: they will come again
            pace = (now - self._moved) / (step - self.step)
            self._step_s = pace if self._step_s is None else 0.9 * self._step_s + 0.1 * pace
        self._moved = now
        self.step = step
        self.tokens += values.get("train/student_tokens", 0.0)

    @property
    def step_s(self) -> float:
        """Seconds a step takes of late; 0 before the second."""
        return self._step_s or 0.0

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> str:
        if self._step_s is None or self._moved is None:
            return "-"
        return clock(max(0.0, self._step_s * (self.total - self.step) - (time.monotonic() - self._moved)))


class Times(ProgressColumn):
    """Time gone by and time left, which move on between steps too."""

    def __init__(self, progression: Progression) -> None:
        super().__init__()
        self._progression = progression

    def render(self, task: Task) -> Text:
        elapsed, left = clock(self._progression.elapsed_s), self._progression.left
        return Text.assemble(("elapsed ", "dim"), elapsed, ("  left ", "dim"), left)


class ConsoleLogger(Logger):
    """Live progress in a terminal; elsewhere a plain line every `interval_s`: log files stay small, and none silent."""

    def __init__(self, settings: ConsoleSettings, console: Console) -> None:
        self._settings = settings
        self._console = console
        self._live: Live | None = None
        self._ticker: Ticker | None = None

    def start(self, run: RunSummary, step: int) -> None:
        self._run = run
        self._progression = Progression(run.total_steps, step)
        self._step_time = StepTime()
        self._best = math.inf
        self._printed = -math.inf
        self._doing = self._next_step(step)
        self._console.print(header(run, step))
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._start_live(step)
        else:
            self._ticker = Ticker(self._print_work, max(LEAST_INTERVAL_S, self._settings.interval_s))

    def _start_live(self, step: int) -> None:
        self._bar = Progress(
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TaskProgressColumn(),
            Times(self._progression),
            expand=True,
            auto_refresh=False,
        )
        self._task = self._bar.add_task("", total=self._run.total_steps, completed=step)
        self._facts: list[RenderableType] = []
        self._live = Live(get_renderable=self._drawn, console=self._console, refresh_per_second=2)
        self._live.start()

    def _drawn(self) -> Group:
        return Group(self._bar, *self._facts, WorkLine(lambda: self._doing))

    def phase(self, name: str) -> None:
        self._doing = Work(name)
        if self._live is None:
            self._print(Text(name, "dim"))

    def warn(self, message: str) -> None:
        self._print(Text(f"warning: {message}", "yellow"))

    def _print(self, shown: RenderableType) -> None:
        if self._ticker is not None:
            self._ticker.touch()
        self._console.print(shown)

    def _print_work(self) -> None:
        self._console.print(Text(work_line(current() or self._doing), "dim"))

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
        if self._live is not None:
            self._update_live(values)
        elif self._is_due(step, values):
            self._printed = time.monotonic()
            lead, tail = Text(f"step {self._counted(step)}"), f"  left {self._progression.left}"
            self._print(Line(lead, shown_fields(values), values, tail))
            if self._step_time.has_news():
                self._print(self._step_time.line())

    def _is_due(self, step: int, values: Mapping[str, float]) -> bool:
        # early enough that the next step's line need not be waited for in silence
        waited = time.monotonic() - self._printed >= EARLY * self._settings.interval_s - self._progression.step_s
        return waited or step == self._run.total_steps or "val/loss" in values

    def _update_live(self, values: Mapping[str, float]) -> None:
        self._bar.update(self._task, completed=self._progression.step)
        self._facts = [Line(Text(), shown_fields(values), values), self._step_time.line()]

    def _print_validation(self, step: int, values: Mapping[str, float]) -> None:
        bits = values.get("val/bits_per_byte", math.nan)
        better, first = bits < self._best, self._best == math.inf
        if better:
            self._best = bits
        lead = Text.assemble(f"step {self._counted(step)}  ", ("val", "bold green" if better else "bold yellow"))
        self._print(Line(lead, VALIDATION, values, "  best" if better and not first else ""))

    def _print_questions(self, step: int, values: Mapping[str, float]) -> None:
        lead = Text.assemble(f"step {self._counted(step)}  ", ("questions", "bold green"))
        self._print(Line(lead, EVALUATION, values))
        for teacher in self._run.teachers:
            fields = tuple((name, f"{key}/{teacher.name}", form) for name, key, form in EVALUATION)
            if any(key in values for _, key, _ in fields):
                self._print(Line(Text(f"  teacher {teacher.name}"), fields, values))

    def _counted(self, step: int) -> str:
        total = str(self._run.total_steps)
        return f"{step:>{len(total)}}/{total}"

    def summary(self, closing: ClosingTable) -> None:
        self.end_display()
        if closing.rows:
            self._print(closing_table(closing))
        if closing.scores:
            self._print(score_table(closing))
        done = Table.grid(padding=(0, 2))
        done.add_row("[dim]done[/]", self._achieved())
        done.add_row("[dim]model[/]", Text(str(self._run.output_dir / "final"), overflow="fold"))
        done.add_row("[dim]report[/]", Text(str(self._run.output_dir / "report" / "report.html"), overflow="fold"))
        self._print(Padding(done, (0, 0, 0, 1)))

    def _achieved(self) -> str:
        progression = self._progression
        return f"step {progression.step:,}, {amount(progression.tokens)} student tokens, {clock(progression.elapsed_s)}"

    def close(self) -> None:
        self.end_display()
        if self._ticker is not None:
            ticker, self._ticker = self._ticker, None
            ticker.close()

    def end_display(self) -> None:
        if self._live is not None:
            live, self._live = self._live, None
            live.stop()
