#!/usr/bin/env python
"""The last step of a projection: the prefix maps that the losses byte_prefix and shared_prefix read."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse

from rich.console import Console

from nemo_opd.projection import ProjectionMatrix, add_byte_prefix, add_shared_prefix
from tools.projection import command

EPILOG = """\
Three maps are added to the file; the rows stay as they are.
  byte prefix Φ       teacher token → the longest student token that its bytes begin with: 'recognition' → 'recogn'
  shared prefix Ψ     a token of either side → the longest token of both vocabularies that its bytes begin with

Where a vocabulary has all single bytes, every token with bytes has such a prefix, so the whole mass of a distribution
can be moved over. Special tokens go by role.

example:
  uv run tools/projection/byte_prefix.py cut.safetensors --output pair.safetensors
      byte prefix: 3,050 of 3,050 teacher tokens; shared prefix: 2,048 of 2,048 student and 3,050 of 3,050 …
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_file(parser)
    command.add_output(parser)
    command.add_pair(parser, required=False)
    return parser.parse_args(arguments)


def build(arguments: argparse.Namespace, console: Console) -> None:
    command.check_output(arguments.output)
    matrix, pair = command.load_file(arguments)
    with command.steps(console) as steps:
        steps.begin("finding prefixes")
        matrix = add_byte_prefix(matrix, pair.student, pair.teacher)
        matrix = add_shared_prefix(matrix, pair.student, pair.teacher)
    console.print(shown_maps(matrix), highlight=False, soft_wrap=True)
    command.write(matrix, arguments.output, console)


def shown_maps(matrix: ProjectionMatrix) -> str:
    """How many tokens each map covers."""
    maps = (matrix.byte_prefix, matrix.student_shared_prefix, matrix.teacher_shared_prefix)
    phi, student, teacher = (f"{int((ids >= 0).sum()):,} of {len(ids):,}" for ids in maps if ids is not None)
    return f"byte prefix: {phi} teacher tokens; shared prefix: {student} student and {teacher} teacher tokens"


def main(arguments: list[str] | None = None) -> int:
    return command.run(build, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
