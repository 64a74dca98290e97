"""What a logger is told: the run's facts at the start, a record a step, the closing table at the end."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

STUDENT_BEFORE = "student before"
STUDENT_AFTER = "student after"


@dataclass(frozen=True, slots=True)
class TeacherSummary:
    """A teacher as the header shows it."""

    name: str
    model: str
    type: str
    """same_tokenizer or cross_tokenizer."""
    weight: float
    loss: str
    """The term it teaches through, such as p_kl."""
    coverage: tuple[str, ...] = ()
    """How its vocabulary fits the student's (METHODS §2), in lines."""
    warnings: tuple[str, ...] = ()
    """Why its loss fits the pair badly, in sentences."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The facts of a run that are known before its first step."""

    name: str
    student: str
    teachers: tuple[TeacherSummary, ...]
    device: str
    """As people call it: `cpu`, `NVIDIA H100`."""
    layout: str
    """How the student is spread over ranks, and its teachers where they are spread in another way."""
    total_steps: int
    global_batch_size: int
    micro_batch_size: int
    max_length: int
    output_dir: Path
    warnings: tuple[str, ...] = ()
    """What is suspicious about it, in sentences."""


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
    """How well the student answers questions, by one measure, beside its teachers."""

    measure: str
    """Such as `pass@1`."""
    before: Score | None
    after: Score
    teachers: Mapping[str, Score] = field(default_factory=dict)
    """By name, of those that were asked."""

    @property
    def by_model(self) -> dict[str, Score]:
        """Student before, student after, then the teachers; those that are known."""
        before = {} if self.before is None else {STUDENT_BEFORE: self.before}
        teachers = {f"teacher {name}": score for name, score in self.teachers.items()}
        return before | {STUDENT_AFTER: self.after} | teachers


@dataclass(frozen=True, slots=True)
class ClosingTable:
    """What a run achieved: the student before and after, beside its teachers."""

    before: ClosingRow | None
    after: ClosingRow | None
    teachers: tuple[ClosingRow, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    """Where the student was asked questions."""

    @property
    def rows(self) -> tuple[ClosingRow, ...]:
        """Student before, student after, then the teachers; those that are known."""
        return tuple(row for row in (self.before, self.after, *self.teachers) if row is not None)

    def change(self, row: ClosingRow) -> float | None:
        """Bits per byte relative to the student before: −0.1 is a tenth fewer. None for itself, or where unknown."""
        start = self.before.bits_per_byte if self.before else None
        if row is self.before or row.bits_per_byte is None or not start:
            return None
        return row.bits_per_byte / start - 1


class Logger(ABC):
    """One place metrics go. One process calls start, log for each step, summary if the run ends well, and close."""

    @abstractmethod
    def start(self, run: RunSummary, step: int) -> None:
        """Opens what the logger writes to.

        `step` is the last step that is kept: the checkpoint's where a run continues, else 0, which starts afresh.
        """

    def phase(self, name: str) -> None:  # noqa: B027  # few loggers have a use for it
        """Says what the run is doing when that is no step; for people only."""

    def end_display(self) -> None:  # noqa: B027  # few loggers have one
        """Removes what is redrawn in place, before an error is shown below it; no step follows."""

    def warn(self, message: str) -> None:  # noqa: B027  # for people, as the above
        """Says that something is wrong, so that it stays to be read."""

    @abstractmethod
    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Records one step; any key may be missing, and a value may be NaN or infinite."""

    @abstractmethod
    def summary(self, closing: ClosingTable) -> None:
        """Records what the run achieved."""

    @abstractmethod
    def close(self) -> None:
        """Flushes and releases everything. Safe to call twice, and without start."""
