"""Rows of a run's learned projections for the report."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment.pieces import pieces_of
from nemo_opd.config.teacher import OwnIdsTeacher
from nemo_opd.logging.projections import MovedRow, write_projections
from nemo_opd.models.load import tokenizer_of
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.samples import entries_of, shown_token
from nemo_opd.training.plan import Plan
from nemo_opd.workers.learned_projections import EXPORTS

_ROWS = 20
"""Number of rows per projection in the report."""


def write_learned_rows(plan: Plan, exported: Path) -> None:
    """Write the rows that moved furthest in each learned projection to the run's directory.

    exported: folder of the exported student.
    """
    rows = {}
    for i, (teacher, planned) in enumerate(zip(plan.config.active_teachers, plan.teachers, strict=True)):
        if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr and planned.projection is not None:
            learned = ProjectionMatrix.load(exported / EXPORTS / f"{teacher.name}.safetensors")
            tokenizers = tokenizer_of(plan.config.student, key="student"), tokenizer_of(teacher, key=f"teachers.{i}")
            rows[teacher.name] = list(_moved_rows(planned.projection, learned, *tokenizers))
    if rows:
        write_projections(plan.output_dir, rows)


def _moved_rows(
    start: ProjectionMatrix,
    learned: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
) -> Iterator[MovedRow]:
    """Yield the rows whose weights moved furthest. Both matrices must have the same entries."""
    moved = np.abs(learned.weights - start.weights).sum(axis=1) / 2
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    for i in np.argsort(-moved, kind="stable")[:_ROWS].tolist():
        entries_before, entries_after = (
            tuple((entry.token, entry.weight) for entry in entries_of(matrix, i, teacher_tokenizer, teacher))
            for matrix in (start, learned)
        )
        if moved[i] > 0:
            yield MovedRow(shown_token(student_tokenizer, student, i), float(moved[i]), entries_before, entries_after)
