"""The interface of a logger and what it receives: the run's facts, a record for each step, the closing table."""

import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nemo_opd.logging.formats import is_mean, is_share

STUDENT_BEFORE = "student before"
STUDENT_AFTER = "student after"


@dataclass(frozen=True, slots=True)
class TeacherSummary:
    """A teacher as the header shows it."""

    name: str
    model: str
    type: str
    """Type of its configuration, such as cross_tokenizer."""
    weight: float
    loss: str
    """Type of its distillation loss, such as p_kl."""
    coverage: tuple[str, ...] = ()
    """Lines on how its vocabulary fits the student's (methods.md §2.7)."""
    warnings: tuple[str, ...] = ()
    """Sentences on why its loss fits the pair badly."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The facts of a run that are known before its first step."""

    name: str
    student: str
    teachers: tuple[TeacherSummary, ...]
    device: str
    """Common name of the device: `cpu`, `NVIDIA H100`."""
    layout: str
    """Sharding of the student over ranks, and of the teachers where it differs."""
    total_steps: int
    batch: str
    """Contents of an optimizer step, such as `64 packed rows of 2,048 tokens`."""
    tokens_at_a_time: int
    """Tokens of a microbatch of a rank."""
    output_dir: Path
    warnings: tuple[str, ...] = ()
    """Sentences on suspicious settings."""


@dataclass(frozen=True, slots=True)
class ClosingRow:
    """A model and how well it predicts the validation text."""

    name: str
    bits_per_byte: float | None
    """None where nothing was validated."""
    note: str = ""


class Score(NamedTuple):
    """A share of questions, with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class ScoreRow:
    """One measure of the answers to questions: the student's, before and after, and its teachers'."""

    measure: str
    """Name such as `pass@1`, or `gsm8k/pass@1` of a set with a name."""
    before: Score | None
    after: Score
    teachers: Mapping[str, Score] = field(default_factory=dict)
    """Scores of the teachers that were asked, by name."""
    differences: Mapping[str, Score] = field(default_factory=dict)
    """Gain of the student after the run over another of `by_model`, for the same questions."""

    @property
    def by_model(self) -> dict[str, Score]:
        """The known scores: student before, student after, teachers."""
        before = {} if self.before is None else {STUDENT_BEFORE: self.before}
        teachers = {f"teacher {name}": score for name, score in self.teachers.items()}
        return before | {STUDENT_AFTER: self.after} | teachers

    @property
    def is_share(self) -> bool:
        """Whether scores are shares of questions, which are written in per cent."""
        return is_share(self.measure, *(bound for score in self.by_model.values() for bound in score))


class Best(NamedTuple):
    """The checkpoint with the best value of a metric."""

    metric: str
    step: int
    value: float


@dataclass(frozen=True, slots=True)
class ClosingTable:
    """The result of a run: the student before and after, and its teachers."""

    before: ClosingRow | None
    after: ClosingRow | None
    teachers: tuple[ClosingRow, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    """One row for each measure; empty where no questions were asked."""
    best: Best | None = None
    """The checkpoint in `best/`; None without `train.keep_best`."""

    @property
    def rows(self) -> tuple[ClosingRow, ...]:
        """The known rows: student before, student after, teachers."""
        return tuple(row for row in (self.before, self.after, *self.teachers) if row is not None)

    @property
    def shown_scores(self) -> list[ScoreRow]:
        """Scores without means of rewards that are pass@1 of the same set, as all are whose rewards are 0 or 1."""
        known = {row.measure: row.by_model for row in self.scores}
        return [
            row
            for row in self.scores
            if not is_mean(row.measure) or known.get(re.sub("mean@[0-9]+$", "pass@1", row.measure)) != row.by_model
        ]

    @property
    def scored_models(self) -> list[str]:
        """Models that have a score."""
        return list(dict.fromkeys(model for row in self.scores for model in row.by_model))

    def change(self, row: ClosingRow) -> float | None:
        """Return the change of bits per byte from the student before; None for that row, or where unknown.

        −0.1 is a tenth fewer.
        """
        start = self.before.bits_per_byte if self.before else None
        if row is self.before or row.bits_per_byte is None or not start:
            return None
        return row.bits_per_byte / start - 1


class Logger(ABC):
    """A destination of metrics. One process calls start, log for each step, summary if the run ends well, and close."""

    @abstractmethod
    def start(self, run: RunSummary, step: int) -> None:
        """Open the destination.

        step: the last step that is kept, which is the checkpoint's where a run continues; 0 starts afresh.
        """

    def phase(self, name: str) -> None:  # noqa: B027  # optional, as the next two
        """Show what the run does between steps."""

    def end_display(self) -> None:  # noqa: B027
        """Remove what is redrawn in place, so that an error can be shown below it; no step follows."""

    def warn(self, message: str) -> None:  # noqa: B027
        """Show a warning that stays readable."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Record one step; any key may be missing, and a value may be NaN or infinite."""

    @abstractmethod
    def summary(self, closing: ClosingTable) -> None:
        """Record the result of the run."""

    @abstractmethod
    def close(self) -> None:
        """Flush and release everything. May be called twice, and without start."""
