"""The closing table of a run."""

from collections.abc import Mapping
from pathlib import Path

from nemo_opd.config.run import RunConfig
from nemo_opd.logging import ClosingRow, ClosingTable
from nemo_opd.logging.base import STUDENT_AFTER, STUDENT_BEFORE, ScoreRow
from nemo_opd.logging.jsonl import read
from nemo_opd.logging.question_values import read_values
from nemo_opd.training.scores import scores


def closing_table(
    config: RunConfig, folder: Path, bits_per_byte: Mapping[str, float], student_after: float | None, steps: int
) -> ClosingTable:
    """Return the bits per byte of student and teachers, and their scores.

    folder: of the run. bits_per_byte: of the student before training, and of each teacher by its name.
    """

    def row(name: str, bits: float | None, note: str = "") -> ClosingRow | None:
        return None if bits is None else ClosingRow(name, bits, note)

    teachers = [
        row(f"teacher {teacher.name}", bits_per_byte.get(teacher.name), teacher.type.replace("_", " "))
        for teacher in config.active_teachers
    ]
    return ClosingTable(
        before=row(STUDENT_BEFORE, bits_per_byte.get(STUDENT_BEFORE)),
        after=row(STUDENT_AFTER, student_after, f"{steps} steps"),
        teachers=tuple(teacher for teacher in teachers if teacher is not None),
        scores=_scores(config, folder),
    )


def _scores(config: RunConfig, folder: Path) -> tuple[ScoreRow, ...]:
    if config.evaluation is None:
        return ()
    records, values = read(folder / "metrics.jsonl"), read_values(folder / "evaluation.jsonl")
    settings = config.evaluation
    return scores(records, config.active_names, values, lambda name: settings.asked.get(name, settings).confidence)
