"""The closing table of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from nemo_opd.config.run import RunConfig
from nemo_opd.logging import ClosingRow, ClosingTable
from nemo_opd.logging.base import STUDENT_AFTER, STUDENT_BEFORE, ScoreRow
from nemo_opd.logging.jsonl import read
from nemo_opd.logging.question_values import read_values
from nemo_opd.logging.score_keys import PREFIX
from nemo_opd.training.scores import scores


def closing_table(
    config: RunConfig,
    folder: Path,
    bits_per_byte: Mapping[str, float],
    student_after: float | None,
    steps: int,
    *,
    is_end: bool = True,
) -> ClosingTable:
    """Build the closing table: bits per byte and scores of student and teachers.

    folder: the run's directory. bits_per_byte: keyed by name, for the student before training and the teachers.
    is_end: report the trained student's last scores; otherwise only scores measured at exactly `steps`.
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
        scores=_scores(config, folder, None if is_end else steps),
    )


def closing_at(config: RunConfig, folder: Path, bits_per_byte: Mapping[str, float], step: int) -> ClosingTable:
    """Build the closing table as if the run had ended at a step."""
    measured = _measured_at(read(folder / "metrics.jsonl"), step)
    return closing_table(config, folder, bits_per_byte, measured.get("val/bits_per_byte"), step, is_end=False)


def _scores(config: RunConfig, folder: Path, step: int | None) -> tuple[ScoreRow, ...]:
    if config.evaluation is None:
        return ()
    records, values = read(folder / "metrics.jsonl"), read_values(folder / "evaluation.jsonl")
    if step is not None:
        records = [record for record in records if record["step"] <= step]
    settings = config.evaluation
    rows = scores(records, config.active_names, values, lambda name: settings.all_sets.get(name, settings).confidence)
    if step is None:
        return rows
    measured = _measured_at(records, step)
    return tuple(row for row in rows if f"{PREFIX}{row.measure}" in measured)


def _measured_at(records: Sequence[Mapping[str, float]], step: int) -> Mapping[str, float]:
    return next((record for record in records if record["step"] == step), {})
