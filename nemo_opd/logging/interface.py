"""Interface of loggers and their input: the run's facts, a record for each step, the closing table."""

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

STUDENT_BEFORE = "student before"
STUDENT_AFTER = "student after"
_NO_SHARES = {"perplexity", "word_perplexity", "byte_perplexity", "bits_per_byte", "brier_score", "likelihood_diff"} | {
    *("mse", "mcc", "bleu", "chrf", "ter")
}
"""Metrics of lm-eval that are not shares of questions, even if they lie between 0 and 1."""
_UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True, slots=True)
class TeacherSummary:
    """A teacher, as shown in the header."""

    name: str
    model: str
    type: str
    """Type of its configuration, such as cross_tokenizer."""
    weight: float
    loss: str
    """Type of its distillation loss, such as p_kl."""
    coverage: tuple[str, ...] = ()
    """Lines on how well its vocabulary covers the student's (methods.md §2.7)."""
    warnings: tuple[str, ...] = ()
    """Sentences on why its loss fits the pair badly."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Facts of a run that are known before its first step."""

    name: str
    student: str
    teachers: tuple[TeacherSummary, ...]
    device: str
    """Common name of the device: `cpu`, `NVIDIA H100`."""
    layout: str
    """Sharding of the student over ranks, and of teachers whose sharding differs."""
    total_steps: int
    choices: Mapping[str, str]
    """What the settings come to, by heading: steps and epochs, learning rate, loss with its weights."""
    data: str
    """Number of training documents, the columns that they are read from, and how many may be cut."""
    batch: str
    """Contents of an optimizer step, such as `64 packed rows of 2,048 tokens`."""
    tokens_at_a_time: int
    """Tokens of a rank's microbatch."""
    output_dir: Path
    warnings: tuple[str, ...] = ()
    """Sentences on suspicious settings."""


@dataclass(frozen=True, slots=True)
class ClosingRow:
    """A model and its bits per byte on the validation text."""

    name: str
    bits_per_byte: float | None
    """The student's, over all validation bytes that it predicts, whatever the teachers. None for a teacher, and if
    nothing was validated.
    """
    note: str = ""
    shared_bits_per_byte: float | None = None
    """Over the validation bytes that student and teachers all predict; None without teachers."""


class Score(NamedTuple):
    """A share of questions, with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One measure of the answers to questions: of the student before and after, and of its teachers."""

    measure: str
    """Name such as `pass@1`, or `gsm8k/pass@1` for a named set."""
    before: Score | None
    after: Score
    teachers: Mapping[str, Score] = field(default_factory=dict)
    """Scores of the teachers that were asked, by name."""
    differences: Mapping[str, Score] = field(default_factory=dict)
    """Gain of the student after the run over another model of `by_model`, on the same questions."""

    @property
    def by_model(self) -> dict[str, Score]:
        """Available scores: student before, student after, teachers."""
        before = {} if self.before is None else {STUDENT_BEFORE: self.before}
        teachers = {f"teacher {name}": score for name, score in self.teachers.items()}
        return before | {STUDENT_AFTER: self.after} | teachers

    @property
    def is_share(self) -> bool:
        """Whether scores are shares of questions, written in per cent."""
        return is_share(self.measure, *(bound for score in self.by_model.values() for bound in score))


class Best(NamedTuple):
    """The checkpoint with the best value of a metric."""

    metric: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sentences on a run's result, for readers."""

    sentences: tuple[str, ...]
    """The student's change, and whether its teachers helped."""
    remarks: tuple[str, ...] = ()
    """Sentences on what makes the result bad or doubtful."""
    is_worse: bool = False
    """Whether the student is worse than before the run, by more than chance."""
    teacher_effect: str = ""
    """`helped`, `made it worse` or `cannot be told`; empty without teachers."""


@dataclass(frozen=True, slots=True)
class ClosingTable:
    """Results of a run: of the student before and after, and of its teachers."""

    before: ClosingRow | None
    after: ClosingRow | None
    baseline: ClosingRow | None = None
    """After the same steps without teachers, if such a run is known."""
    teachers: tuple[ClosingRow, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    """One row for each measure; empty if no questions were asked."""
    best: Best | None = None
    """The checkpoint in `best/`, if `train.keep_best` is set."""
    verdict: Verdict = Verdict(())
    is_exported: bool = True
    """Whether the final student was exported; a worse one is not, unless `run.export_worse`."""

    @property
    def rows(self) -> tuple[ClosingRow, ...]:
        """Available rows: student before, after, and after the run without teachers, then the teachers."""
        return tuple(row for row in (self.before, self.after, self.baseline, *self.teachers) if row is not None)

    @property
    def shown_scores(self) -> list[ScoreRow]:
        """Scores without mean rewards that equal pass@1 of the same set, as they do for rewards of 0 and 1."""
        by_measure = {row.measure: row.by_model for row in self.scores}
        return [
            row
            for row in self.scores
            if not is_mean(row.measure) or by_measure.get(pass_at_1(row.measure)) != row.by_model
        ]

    @property
    def scored_models(self) -> list[str]:
        """Models with a score."""
        return list(dict.fromkeys(model for row in self.scores for model in row.by_model))

    def change(self, row: ClosingRow) -> float | None:
        """Return the relative change of bits per byte from the student before the run: −0.1 is a tenth fewer.

        A teacher is compared over shared bytes. Returns None for that student's own row, and if a figure is unknown.
        """
        if self.before is None or row is self.before:
            return None
        start, value = self.before.bits_per_byte, row.bits_per_byte
        if row in self.teachers:
            start, value = self.before.shared_bits_per_byte, row.shared_bits_per_byte
        return None if value is None or not start else value / start - 1


class Logger(ABC):
    """A destination of metrics. One process calls start, log for each step, summary if the run ends well, and close."""

    @abstractmethod
    def start(self, run: RunSummary, step: int) -> None:
        """Open the destination.

        step: last step to keep, the checkpoint's if a run continues; 0 starts afresh.
        """

    def phase(self, name: str) -> None:  # noqa: B027  # optional, like the next two
        """Show the work between steps."""

    def end_display(self) -> None:  # noqa: B027
        """Remove output that is redrawn in place, so that an error can be printed below; no step follows."""

    def warn(self, message: str) -> None:  # noqa: B027
        """Show a warning that stays readable."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record one step. Any key may be missing, and a value may be NaN or infinite."""

    @abstractmethod
    def summary(self, closing: ClosingTable) -> None:
        """Record the result of the run."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release all resources. May be called twice, and without start."""


def figure(value: float) -> str:
    """Format with three decimals, or three significant digits below 0.1."""
    if value and not 1e-3 <= abs(value) < 1e4:
        return f"{value:.2e}"
    return f"{value:#.3g}" if 0 < abs(value) < 0.1 else f"{value:.3f}"


def bits(value: float) -> str:
    """Format bits per byte with four decimals, or in powers of ten if these would not fit."""
    return f"{value:.2e}" if value and not 1e-3 <= abs(value) < 1e4 else f"{value:.4f}"


def amount(value: float) -> str:
    """Format a count with a unit: 950, 12.3k, 4.56M."""
    for size, unit in _UNITS:
        if abs(value) >= size:
            return f"{value / size:#.3g}".rstrip(".") + unit
    return f"{value:.0f}"


def clock(seconds: float) -> str:
    """Format a duration: 1:05, 2:03:04, 3d 02:00."""
    if not math.isfinite(seconds):
        return "-"
    minutes, whole_seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}d {hours:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{whole_seconds:02}" if hours else f"{minutes}:{whole_seconds:02}"


def change(ratio: float | None) -> str:
    """Format a relative change: -12.3 %; empty for None."""
    return "" if ratio is None else f"{ratio:+.1%}".replace("%", " %")


def share(value: float) -> str:
    """Format a share: 68.5 %."""
    return f"{100 * value:.1f} %"


def score(value: float, low: float, high: float, *, is_share: bool) -> str:
    """Format a score with its interval: 68.5 % (60.1 to 75.9 %)."""
    return "{} ({})".format(*score_texts(value, low, high, is_share=is_share))


def score_texts(value: float, low: float, high: float, *, is_share: bool) -> tuple[str, str]:
    """Format a score and its interval: 68.5 % and 60.1 to 75.9 %; plain numbers if it is not a share."""
    form = share if is_share else figure
    return form(value), f"{form(low).removesuffix(' %')} to {form(high)}"


def difference(value: float, low: float, high: float, *, is_share: bool) -> str:
    """Format a difference of scores: +3.1 ± 1.2 points; plain numbers if it is not of shares."""
    half = (high - low) / 2
    if not is_share:
        return f"{value:+.3f} ± {half:.3f}"
    return f"{100 * value:+.1f} ± {100 * half:.1f} points"


def is_share(measure: str, *values: float) -> bool:
    """Return whether values of a measure are shares, written in per cent: between 0 and 1, and not a perplexity."""
    return _NO_SHARES.isdisjoint(re.split(r"[./]", measure)) and all(0 <= value <= 1 for value in values)


def loss_name(kind: object, divergence: object, common_weight: object) -> str:
    """Return a loss's type, with its divergence if that has an effect."""
    return f"{kind}" if divergence is None or common_weight == 0 else f"{kind} ({divergence})"


def is_mean(measure: str) -> bool:
    """Return whether a measure is a mean of rewards, which need not be a share."""
    return measure.rpartition("/")[2].startswith("mean@")


def pass_at_1(mean: str) -> str:
    """Return the name of the same set's pass@1, which a mean of rewards of 0 and 1 equals."""
    return re.sub("mean@[0-9]+$", "pass@1", mean)
