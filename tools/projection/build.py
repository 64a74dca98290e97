#!/usr/bin/env python
"""Builds the projection of a student–teacher pair of tokenizers and prints what it covers."""

import sys

# This folder comes first on a script's path, and its inspect.py would stand in for the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path.pop(0)

import argparse
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from nemo_opd.errors import OPDError
from nemo_opd.models.load import load_tokenizer
from nemo_opd.projection import ProjectionMatrix, audit, build_projection
from nemo_opd.projection.report import audit_table

EPILOG = """\
A projection says with which teacher tokens each student token is spelled. It needs the two tokenizers only, is built
once per pair, and is what cross-tokenizer losses such as p_kl compare vocabularies through.

examples:
  uv run tools/projection/build.py --student meta-llama/Llama-3.2-1B --teacher Qwen/Qwen3-4B \\
      --output llama_qwen.safetensors
  uv run tools/projection/inspect.py llama_qwen.safetensors

Give the file to a teacher of a run with `projection: llama_qwen.safetensors`. With `projection: auto` a run builds and
caches the same matrix by itself.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--student", required=True, metavar="TOKENIZER", help="folder or hub name of the student")
    parser.add_argument("--teacher", required=True, metavar="TOKENIZER", help="folder or hub name of the teacher")
    parser.add_argument("--output", required=True, type=Path, metavar="FILE", help="the .safetensors file to write")
    parser.add_argument("--top-k", type=int, default=4, help="teacher tokens kept for a student token (default 4)")
    return parser.parse_args(arguments)


def build(arguments: argparse.Namespace, console: Console) -> None:
    student = load_tokenizer(arguments.student, key="--student")
    teacher = load_tokenizer(arguments.teacher, key="--teacher")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("tokens spelled by the teacher", total=None)
        matrix: ProjectionMatrix = build_projection(
            student,
            teacher,
            arguments.top_k,
            lambda done, total: progress.update(task, completed=done, total=total),
        )
    figures = audit(student, teacher, matrix)
    matrix.save(arguments.output)
    console.print(audit_table(figures))
    console.print(f"wrote {arguments.output} ({arguments.output.stat().st_size / 1e6:.1f} MB)", highlight=False)


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(arguments)
    try:
        build(parsed, Console())
    except (OPDError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
