"""Counting the units of a global batch, by which its sums are divided on every rank (METHODS §7)."""

from collections.abc import Sequence

from nemo_opd.losses.build import TermLoss
from nemo_opd.losses.reduction import count_label_tokens
from nemo_opd.types import Batch, Normalizers


def count_units(batch: Batch, terms: Sequence[TermLoss]) -> Normalizers:
    """One count for cross-entropy and for each teacher's term; at least 1, as a batch without units divides 0 by it."""
    labels = count_label_tokens(batch.student.loss_mask)
    kd = (term.num_units(batch.student, teacher) for term, teacher in zip(terms, batch.teachers, strict=True))
    return Normalizers(max(1, labels), tuple(max(1, units) for units in kd))
