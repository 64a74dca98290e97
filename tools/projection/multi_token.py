#!/usr/bin/env python
"""Step 2 of a projection: student tokens without a partner, spelled with the teacher's pieces of their bytes."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse

from rich.console import Console

from nemo_opd.projection import add_multi_token
from tools.projection import command

EPILOG = """\
The teacher writes '885' as '8', '8', '5'. The row gets its pieces with weights falling by ten: 0.9, 0.09, 0.009, added
up where a piece repeats and scaled to sum 1. The first piece weighs most, because it is what the teacher says next
where the student says '885'.

--reverse (step 3) also spells each teacher token that has no partner with the student, and adds the entry the other way
round, to the rows of the student's pieces, most of it to the first: more teacher tokens are reached.

example:
  uv run tools/projection/multi_token.py exact.safetensors --output spelled.safetensors
      wrote spelled.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 2 teacher tokens each (0.1 MB)
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_file(parser, "what exact_map.py wrote")
    command.add_output(parser)
    parser.add_argument(
        "--width", type=int, default=8, metavar="N", help="entries kept in a row until sort_and_cut.py (default 8)"
    )
    parser.add_argument("--reverse", action="store_true", help="also add the spellings of teacher tokens (step 3)")
    command.add_pair(parser, required=False)
    return parser.parse_args(arguments)


def build(arguments: argparse.Namespace, console: Console) -> None:
    command.check_output(arguments.output)
    matrix, pair = command.load_file(arguments)
    with command.steps(console) as steps:
        matrix = add_multi_token(
            matrix,
            pair.student,
            pair.teacher,
            width=arguments.width,
            reverse=arguments.reverse,
            progress=steps.begin("spelling tokens"),
        )
    command.write(matrix, arguments.output, console)


def main(arguments: list[str] | None = None) -> int:
    return command.run(build, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
