"""Contents of a projection file, as tables, JSON or a heat map."""

import json
from argparse import Namespace
from dataclasses import asdict

from rich.console import Console

from nemo_opd.alignment.roles import RolePair, paired_roles
from nemo_opd.cli.projection.pair import load_file
from nemo_opd.projection import ProjectionMatrix, audit
from nemo_opd.projection.audit import Audit, fit_warnings
from nemo_opd.projection.heat_map import plot_samples
from nemo_opd.projection.report import audit_table, roles_table, sample_table, short_name
from nemo_opd.projection.samples import Sample, samples


def show(arguments: Namespace, console: Console) -> None:
    matrix, pair = load_file(arguments)
    figures = audit(pair.student, pair.teacher, matrix)
    rows = samples(matrix, pair.student, pair.teacher, arguments.samples)
    roles = paired_roles(pair.student, pair.teacher, dict(matrix.options.roles))
    reasons = fit_warnings(figures, arguments.loss) if arguments.loss else []
    if arguments.plot:
        plot_samples(rows, arguments.plot, heading(figures, matrix))
    if arguments.json:
        print(json.dumps(as_json(figures, matrix, roles, rows, reasons)))
        return
    for table in (audit_table(figures), roles_table(roles), sample_table(rows)):
        console.print(table)
    if arguments.loss:
        console.print(
            "\n".join(reasons) or f"{arguments.loss} fits this pair", markup=False, highlight=False, soft_wrap=True
        )


def heading(figures: Audit, matrix: ProjectionMatrix) -> str:
    names = f"{short_name(figures.student_name)} → {short_name(figures.teacher_name)}"
    return f"{names}   {matrix.student_vocab_size:,} × {matrix.teacher_vocab_size:,}, overlap {figures.overlap:.3f}"


def as_json(
    figures: Audit,
    matrix: ProjectionMatrix,
    roles: list[RolePair],
    rows: list[Sample],
    reasons: list[str],
) -> dict[str, object]:
    """Return the audit's figures by name, with the other printed values."""
    return asdict(figures) | {
        "recommended_loss": figures.recommended_loss,
        "warnings": reasons,
        "roles": [asdict(row) for row in roles],
        "options": asdict(matrix.options),
        "samples": [asdict(row) for row in rows],
    }
