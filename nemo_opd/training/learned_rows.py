"""What a run has learned about its projections, for the report."""

from pathlib import Path

from nemo_opd.config.teacher import OwnIdsTeacher
from nemo_opd.logging.projections import write_projections
from nemo_opd.models.load import tokenizer_of
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.projection.moved import moved_rows
from nemo_opd.training.plan import Plan
from nemo_opd.workers.learned_projections import EXPORTS

_ROWS = 20
"""Rows of each projection in the report."""


def write_learned_rows(plan: Plan, exported: Path) -> None:
    """Write the rows that moved furthest in each projection of an exported student into the run's directory."""
    found = {}
    for i, (teacher, planned) in enumerate(zip(plan.config.active_teachers, plan.teachers, strict=True)):
        if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr and planned.projection is not None:
            learned = ProjectionMatrix.load(exported / EXPORTS / f"{teacher.name}.safetensors")
            tokenizers = tokenizer_of(plan.config.student, key="student"), tokenizer_of(teacher, key=f"teachers.{i}")
            found[teacher.name] = moved_rows(planned.projection, learned, *tokenizers, _ROWS)
    if found:
        write_projections(plan.output_dir, found)
