"""The texts of a measured step, and their FLOPs."""

from dataclasses import dataclass

from nemo_opd.training.flops import Flops, forward_flops, training_flops
from nemo_opd.training.model_size import ModelSize


@dataclass(frozen=True)
class StepWork:
    """What the texts of a global batch are."""

    student_lengths: tuple[int, ...]
    teacher_lengths: tuple[int, ...]
    compared_rows: int
    """Units of the distillation loss."""

    @property
    def student_tokens(self) -> int:
        return sum(self.student_lengths)

    def flops(self, student: ModelSize, teacher: ModelSize) -> dict[str, Flops]:
        return {
            "student": training_flops(student, self.student_lengths),
            "teacher": forward_flops(teacher, self.teacher_lengths, self.compared_rows),
        }
