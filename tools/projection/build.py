#!/usr/bin/env python
"""Builds the projection of a student–teacher pair of tokenizers, all passes at once, and prints what it covers."""

import sys

# A script's folder comes first on its path, and this one's inspect.py would hide the standard library's.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse

from rich.console import Console

from nemo_opd.projection import ProjectionMatrix, audit, build_projection
from nemo_opd.projection.report import audit_table
from tools.projection import command, embedding

EPILOG = """\
A projection says with which teacher tokens each student token is spelled. It is built once per pair, and is what
cross-tokenizer losses such as p_kl compare vocabularies through. The two tokenizers are all it needs.

This command runs every pass. To look at the matrix between two of them, run them one by one instead:
  exact_map.py      tokens of the same bytes, special tokens of the same role
  multi_token.py    all others, spelled with the teacher's pieces; --reverse adds what teacher tokens are spelled with
  embedding.py      teacher tokens of near embeddings (optional)
  sort_and_cut.py   the heaviest K entries of a row
  byte_prefix.py    the maps that the losses byte_prefix and shared_prefix read

examples:
  uv run tools/projection/build.py --student demo:student --teacher demo:teacher_cross --output pair.safetensors
      …
      │ 2-digit numerals │         0.000 │ 0 of 15 exact, 15 with a row               │
      │ recommended loss │          p_kl │ numerals are not covered by exact pairs    │
      wrote pair.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 2 teacher tokens each (0.1 MB)

  uv run tools/projection/build.py --student meta-llama/Llama-3.2-1B --teacher Qwen/Qwen3-4B \\
      --roles '<|reserved_special_token_0|>=think_start' --output llama_qwen.safetensors

Give the file to a teacher of a run with `projection: pair.safetensors`. With `projection: auto` a run builds and
caches the matrix by itself, without the optional passes.
"""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.make_parser(__doc__, EPILOG)
    command.add_pair(parser, required=True)
    command.add_output(parser)
    command.add_top_k(parser)
    command.add_roles(parser)
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="also spell teacher tokens with the student and add the symmetric entries, so that more of the teacher's "
        "vocabulary is reached",
    )
    embedding.add_embeddings_arguments(parser, required=False)
    return parser.parse_args(arguments)


def build(arguments: argparse.Namespace, console: Console) -> None:
    command.check_output(arguments.output)
    roles = command.roles_of(arguments.roles)
    pair = command.load_pair(arguments.student, arguments.teacher)
    with command.steps(console) as steps:
        source = None
        if arguments.embeddings:
            steps.begin("reading embeddings")
            source = embedding.read_source(arguments)
        matrix: ProjectionMatrix = build_projection(
            pair.student,
            pair.teacher,
            arguments.top_k,
            steps.begin("building"),
            reverse=arguments.reverse,
            embeddings=source,
            roles=roles,
        )
        steps.begin("auditing")
        figures = audit(pair.student, pair.teacher, matrix)
    console.print(audit_table(figures))
    command.write(matrix, arguments.output, console)


def main(arguments: list[str] | None = None) -> int:
    return command.run(build, parse(arguments))


if __name__ == "__main__":
    sys.exit(main())
