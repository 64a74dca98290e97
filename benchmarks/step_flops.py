"""The texts of a measured step, and their FLOPs."""

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_opd.preflight.flops import Flops, forward_flops, training_flops
from nemo_opd.preflight.model_info import ModelSize


@dataclass(frozen=True)
class StepWork:
    """What the texts of a global batch are."""

    student_lengths: tuple[int, ...]
    teacher_lengths: tuple[tuple[int, ...], ...]
    """Of each teacher."""
    compared_rows: tuple[int, ...]
    """Rows of each teacher's head that its loss reads."""

    @property
    def student_tokens(self) -> int:
        return sum(self.student_lengths)

    def flops(self, student: ModelSize, teachers: Mapping[str, ModelSize]) -> dict[str, Flops]:
        """Of the student, and of each teacher by its name."""
        of_teachers = zip(teachers.items(), self.teacher_lengths, self.compared_rows, strict=True)
        return {"student": training_flops(student, self.student_lengths)} | {
            name: forward_flops(size, lengths, rows) for (name, size), lengths, rows in of_teachers
        }
