"""Counting the units of a global batch, by which its sums are divided on every rank (METHODS §7)."""

from nemo_opd.losses.reduction import count_chunks, count_label_tokens
from nemo_opd.types import Batch, Normalizers, TeacherRows


def count_units(batch: Batch) -> Normalizers:
    """One count per term; at least 1, so that a batch without units divides nothing by nothing."""
    labels = count_label_tokens(batch.student.loss_mask)

    def kd_units(teacher: TeacherRows) -> int:
        if teacher.chunks is None:
            return labels
        return count_chunks(teacher.chunks.student, teacher.chunks.teacher)

    return Normalizers(max(1, labels), tuple(max(1, kd_units(teacher)) for teacher in batch.teachers))
