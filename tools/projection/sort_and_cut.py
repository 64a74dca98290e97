#!/usr/bin/env python
"""Step 5 of a projection: the heaviest K entries of each row, heaviest first, scaled to sum 1."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse

from rich.console import Console

from nemo_opd.projection import ProjectionMatrix, sort_and_cut
from tools.projection import command

EPILOG = """\
A loss pays for every column of the matrix, and four are enough: the i-th piece of a spelled token weighs 0.9 · 0.1^i,
so what comes after the fourth is less than a ten-thousandth of the row. Empty rows stay empty.

example:
  uv run tools/projection/sort_and_cut.py near.safetensors --top-k 4 --output cut.safetensors
      wrote cut.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 4 teacher tokens each (0.1 MB)
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_file(parser)
    command.add_output(parser)
    command.add_top_k(parser, default=None)
    return parser.parse_args(arguments)


def build(arguments: argparse.Namespace, console: Console) -> None:
    command.check_output(arguments.output)
    with command.steps(console) as steps:
        steps.begin("cutting rows")
        matrix = sort_and_cut(ProjectionMatrix.load(arguments.file), arguments.top_k)
    command.write(matrix, arguments.output, console)


def main(arguments: list[str] | None = None) -> int:
    return command.run(build, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
