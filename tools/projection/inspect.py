#!/usr/bin/env python
"""Shows what a projection file holds: the coverage audit, special tokens by role, sample rows, a heat map."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from nemo_opd.alignment.roles import RolePair, paired_roles
from nemo_opd.projection import ProjectionMatrix, audit
from nemo_opd.projection.audit import Audit, fit_warnings
from nemo_opd.projection.heat_map import plot_samples
from nemo_opd.projection.report import audit_table, roles_table, sample_table, short_name
from nemo_opd.projection.samples import Sample, samples
from tools.projection import command

EPILOG = """\
What to look at:
  overlap            how much of the vocabulary the two sides share; published pairs lie between 0.63 and 0.85
  N-digit numerals   exact pairs for all of them: h_kl works; for some lengths only: p_kl
  rows of 0          student tokens that learn nothing from this teacher (special tokens without a partner)
  special tokens     the ends of text and turn must have a partner, else the student does not learn to stop
  sample rows        a row leads to the pieces that spell its token and to nothing else

examples:
  uv run tools/projection/inspect.py pair.safetensors
      …
      │ overlap          │         0.991 │ shared tokens / smaller vocabulary                         │
      …
      │ numerals      │ '64'                         │       │ '6' 0.909   '4' 0.0909         │
  uv run tools/projection/inspect.py pair.safetensors --plot pair.png
  uv run tools/projection/inspect.py pair.safetensors --loss h_kl
      h_kl compares exact pairs, but only 0 of 15 numerals of 2 digits and …
  uv run tools/projection/inspect.py pair.safetensors --json | jq .overlap
      0.99072265625
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_file(parser, "a projection of a command of this folder, or a .pt file of NeMo-RL")
    command.add_pair(parser, required=False)
    parser.add_argument(
        "--json", action="store_true", help="print audit, roles, builder options and samples as one JSON object"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write a heat map of the sample rows")
    parser.add_argument(
        "--samples", type=int, default=6, metavar="N", help="sample rows of each kind of token (default 6)"
    )
    parser.add_argument("--loss", metavar="TYPE", help="say why a loss of this type, such as h_kl, fits the pair badly")
    return parser.parse_args(arguments)


def show(arguments: argparse.Namespace, console: Console) -> None:
    matrix, pair = command.load_file(arguments)
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
    """The audit's figures by name, and beside them what else is shown."""
    return asdict(figures) | {
        "recommended_loss": figures.recommended_loss,
        "warnings": reasons,
        "roles": [asdict(row) for row in roles],
        "options": asdict(matrix.options),
        "samples": [asdict(row) for row in rows],
    }


def main(arguments: list[str] | None = None) -> int:
    return command.run(show, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
