"""Rows that two projections of one pair give different weights (methods.md §2.8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nemo_opd.alignment.pieces import pieces_of
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.samples import Entry, entries_of, shown_token

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A student token whose teacher tokens have other weights than before."""

    id: int
    token: str
    """Token as `shown_token` writes it."""
    moved: float
    """½ Σ |after − before|: the share of the weight that has moved."""
    before: tuple[Entry, ...]
    after: tuple[Entry, ...]


def moved_rows(
    start: ProjectionMatrix,
    learned: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    count: int,
) -> list[MovedRow]:
    """Return up to `count` rows whose weights have moved, the furthest first; both matrices have the same entries."""
    moved = np.abs(learned.weights - start.weights).sum(axis=1) / 2
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    order = np.argsort(-moved, kind="stable")[:count]
    return [
        MovedRow(
            int(i),
            shown_token(student_tokenizer, student, int(i)),
            float(moved[i]),
            *(entries_of(matrix, int(i), teacher_tokenizer, teacher) for matrix in (start, learned)),
        )
        for i in order
        if moved[i] > 0
    ]
