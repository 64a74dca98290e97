"""The closing table of a run."""

from collections.abc import Mapping

from nemo_opd.config.run import RunConfig
from nemo_opd.logging import ClosingRow, ClosingTable
from nemo_opd.logging.base import STUDENT_AFTER, STUDENT_BEFORE


def closing_table(
    config: RunConfig, bits_per_byte: Mapping[str, float], student_after: float | None, steps: int
) -> ClosingTable:
    """Return the bits per byte of student and teachers.

    bits_per_byte: of the student before training, and of each teacher by its name.
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
    )
