#!/usr/bin/env python
"""Step 1 of a projection: student tokens that have a partner of the same bytes, special tokens by role."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse

from rich.console import Console

from nemo_opd.projection import exact_map
from tools.projection import command

EPILOG = """\
Two tokens are partners where they stand for the same bytes: 'Ġthe' of a byte-level vocabulary and '▁the' of a
SentencePiece one are both ' the'. Each gets one partner at most. Special tokens have no bytes and are paired by what
they mean: <|eot_id|> and <|im_end|> both end a turn. All other rows stay empty; multi_token.py fills them.

Stop here for a map that holds what both sides agree on and nothing else, as the loss strict compares it.

example:
  uv run tools/projection/exact_map.py --student demo:student --teacher demo:teacher_cross --output exact.safetensors
      wrote exact.safetensors: 2,029 of 2,048 rows, 2,029 exact, up to 1 teacher tokens each (0.0 MB)
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_pair(parser, required=True)
    command.add_output(parser)
    command.add_roles(parser)
    return parser.parse_args(arguments)


def build(arguments: argparse.Namespace, console: Console) -> None:
    command.check_output(arguments.output)
    roles = command.roles_of(arguments.roles)
    pair = command.load_pair(arguments.student, arguments.teacher)
    with command.steps(console) as steps:
        steps.begin("pairing tokens")
        matrix = exact_map(pair.student, pair.teacher, roles=roles)
    command.write(matrix, arguments.output, console)


def main(arguments: list[str] | None = None) -> int:
    return command.run(build, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
