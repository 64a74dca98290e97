#!/usr/bin/env python
"""Converts a projection of NeMo-RL's tools (`.pt`) to the format of this package, and prints what it covers."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse

from rich.console import Console

from nemo_opd.errors import ProjectionError
from nemo_opd.projection import ProjectionMatrix, add_byte_prefix, add_shared_prefix, audit, nemo_rl, sort_and_cut
from nemo_opd.projection.report import audit_table
from tools.projection import command

EPILOG = """\
Two forms are read: {'indices': [V, K], 'likelihoods': [V, K]}, and {(student id, teacher id): weight or count}. Nothing
in the file is run. Rows are scaled to sum 1, repeated entries added up, those without weight dropped; the last column
of a file that declares `enable_scale_trick` is a scale factor at an arbitrary id and is dropped too.

Such a file does not say which rows are exact, and its rows follow the models' padded heads. With --student and
--teacher both are put right by the tokens' bytes, the maps of byte_prefix.py are added, and the result is audited.
Without them it can be looked at, but a run would refuse it.

A matrix that build.py makes in seconds has no such history; convert to repeat an experiment with the very same matrix.

example:
  uv run tools/projection/convert.py projection_matrix_llama_qwen_top4.pt --output llama_qwen.safetensors \\
      --student meta-llama/Llama-3.2-1B --teacher Qwen/Qwen3-4B
      wrote llama_qwen.safetensors: 128,003 of 128,256 rows, 109,487 exact, up to 4 teacher tokens each (5.9 MB)
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_file(parser, "a .pt file of NeMo-RL")
    command.add_output(parser)
    for side in ("student", "teacher"):
        parser.add_argument(f"--{side}", metavar="TOKENIZER", help=f"folder or hub name of the {side}'s tokenizer")
    parser.add_argument(
        "--top-k", type=int, metavar="K", help=f"entries kept in a row (default all, up to {nemo_rl.MAX_WIDTH})"
    )
    command.add_roles(parser)
    return parser.parse_args(arguments)


def convert(arguments: argparse.Namespace, console: Console) -> None:
    command.check_output(arguments.output)
    roles = command.roles_of(arguments.roles)
    if bool(arguments.student) != bool(arguments.teacher):
        raise ProjectionError("--student and --teacher are given together or not at all; a projection is of a pair")
    matrix = nemo_rl.read(arguments.file)
    if arguments.top_k is not None:
        matrix = sort_and_cut(matrix, arguments.top_k)
    if arguments.student:
        matrix = bound(matrix, command.load_pair(arguments.student, arguments.teacher), roles, console)
    else:
        console.print(
            "no --student and --teacher: no row is known to be exact, and no run can use the file", soft_wrap=True
        )
    command.write(matrix, arguments.output, console)


def bound(
    matrix: ProjectionMatrix, pair: command.Pair, roles: dict[str, tuple[str, ...]], console: Console
) -> ProjectionMatrix:
    """The matrix as that of the pair, with prefix maps; its audit is printed."""
    with command.steps(console) as steps:
        steps.begin("comparing bytes")
        matrix = nemo_rl.bind(matrix, pair.student, pair.teacher, roles=roles)
        steps.begin("finding prefixes")
        matrix = add_byte_prefix(matrix, pair.student, pair.teacher)
        matrix = add_shared_prefix(matrix, pair.student, pair.teacher)
        steps.begin("auditing")
        figures = audit(pair.student, pair.teacher, matrix)
    console.print(audit_table(figures))
    return matrix


def main(arguments: list[str] | None = None) -> int:
    return command.run(convert, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
