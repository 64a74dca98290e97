"""Interface of loggers and their input: the run's facts, a record for each step, the closing table."""

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
    """None if nothing was validated."""
    note: str = ""


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
class ClosingTable:
    """Results of a run: of the student before and after, and of its teachers."""

    before: ClosingRow | None
    after: ClosingRow | None
    teachers: tuple[ClosingRow, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    """One row for each measure; empty if no questions were asked."""
    best: Best | None = None
    """The checkpoint in `best/`, if `train.keep_best` is set."""

    @property
    def rows(self) -> tuple[ClosingRow, ...]:
        """Available rows: student before, student after, teachers."""
        return tuple(row for row in (self.before, self.after, *self.teachers) if row is not None)

    @property
    def shown_scores(self) -> list[ScoreRow]:
        """Scores without mean rewards that equal pass@1 of the same set, as they do for rewards of 0 and 1."""
        by_measure = {row.measure: row.by_model for row in self.scores}
        return [
            row
            for row in self.scores
            if not is_mean(row.measure) or by_measure.get(re.sub("mean@[0-9]+$", "pass@1", row.measure)) != row.by_model
        ]

    @property
    def scored_models(self) -> list[str]:
        """Models with a score."""
        return list(dict.fromkeys(model for row in self.scores for model in row.by_model))

    def change(self, row: ClosingRow) -> float | None:
        """Return the relative change of bits per byte from the student before the run: −0.1 is a tenth fewer.

        Returns None for that student's own row, and if either figure is unknown.
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
