#!/usr/bin/env python
"""Shows what a projection file holds: the coverage audit, sample rows, a plot."""

import sys

# This folder comes first on a script's path, and this file would stand in for the standard library's `inspect`.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path.pop(0)

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from nemo_opd.alignment import pieces_of
from nemo_opd.errors import OPDError
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix, audit
from nemo_opd.projection.report import audit_table, plot_sample, sample_table

EPILOG = """\
What to look at:
  overlap            how much of the vocabulary the two sides share; published pairs lie between 0.63 and 0.85
  N-digit numerals   exact pairs for all of them: h_kl works; for some lengths only: p_kl
  rows of 0          student tokens that learn nothing from this teacher (special tokens without a partner)

examples:
  uv run tools/projection/inspect.py llama_qwen.safetensors --plot llama_qwen.png
  uv run tools/projection/inspect.py llama_qwen.safetensors --json | jq .overlap
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="a projection written by tools/projection/build.py")
    parser.add_argument(
        "--student", metavar="TOKENIZER", help="the student's tokenizer, if not where it was built from"
    )
    parser.add_argument(
        "--teacher", metavar="TOKENIZER", help="the teacher's tokenizer, if not where it was built from"
    )
    parser.add_argument("--json", action="store_true", help="print the audit as one JSON object and nothing else")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write a heat map of a sample of rows")
    return parser.parse_args(arguments)


def show(arguments: argparse.Namespace, console: Console) -> None:
    names = ProjectionMatrix.load(arguments.file)
    student = load_tokenizer(arguments.student or names.student_name, key="--student")
    teacher = load_tokenizer(arguments.teacher or names.teacher_name, key="--teacher")
    matrix = ProjectionMatrix.load(arguments.file, student, teacher)
    figures = audit(student, teacher, matrix)
    if arguments.json:
        print(json.dumps(asdict(figures) | {"recommended_loss": figures.recommended_loss}))
    else:
        console.print(audit_table(figures))
        console.print(sample_table(matrix, student, teacher, pieces_of(student), pieces_of(teacher)))
    if arguments.plot:
        plot_sample(matrix, arguments.plot)


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(arguments)
    try:
        show(parsed, Console())
    except (OPDError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
