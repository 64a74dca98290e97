"""Builds the projection of a student–teacher pair of tokenizers, all passes at once, and prints its coverage."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_output, add_pair, add_roles, add_top_k, check_output, roles_of
from nemo_opd.cli.projection.embedding import add_embeddings_arguments, read_source
from nemo_opd.cli.projection.steps import steps, write

EPILOG = """\
A projection maps each student token to the teacher tokens that spell it. Cross-tokenizer losses such as p_kl compare
vocabularies through it. It is built once per pair, from the two tokenizers alone.

This command runs every pass. To inspect the matrix between two passes, run them one by one:
  exact-map      tokens with the same bytes, special tokens with the same role
  multi-token    all other tokens, spelled with the teacher's; --reverse adds spellings of teacher tokens
  embedding      teacher tokens with near embeddings (optional)
  sort-and-cut   the heaviest K entries of a row
  byte-prefix    the maps that the losses byte_prefix and shared_prefix read

examples:
  nemo-opd projection build --student demo:student --teacher demo:teacher_cross --output pair.safetensors
      …
      │ 2-digit numerals │         0.000 │ 0 of 15 exact, 15 with a row               │
      │ recommended loss │          p_kl │ numerals are not covered by exact pairs    │
      wrote pair.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 2 teacher tokens each (0.1 MB)

  nemo-opd projection build --student meta-llama/Llama-3.2-1B --teacher Qwen/Qwen3-4B \\
      --roles '<|reserved_special_token_0|>=think_start' --output llama_qwen.safetensors

A run uses the file if a teacher has `projection: pair.safetensors`. With `projection: auto` the run builds and caches
the matrix itself, without the optional passes.
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_pair(parser, required=True)
    add_output(parser)
    add_top_k(parser)
    add_roles(parser)
    parser.add_argument(
        "--reverse",
        action="store_true",
        help="also spell teacher tokens with student tokens and add the symmetric entries, to reach more of the "
        "teacher's vocabulary",
    )
    add_embeddings_arguments(parser, required=False)


def build(arguments: Namespace, console: Console) -> None:
    check_output(arguments.output)
    roles = roles_of(arguments.roles)
    from nemo_opd.cli.projection.pair import load_pair
    from nemo_opd.projection import audit, build_projection
    from nemo_opd.projection.report import audit_table

    pair = load_pair(arguments.student, arguments.teacher)
    with steps(console) as progress:
        source = None
        if arguments.embeddings:
            progress.begin("reading embeddings")
            source = read_source(arguments)
        matrix = build_projection(
            pair.student,
            pair.teacher,
            arguments.top_k,
            progress.begin("building"),
            reverse=arguments.reverse,
            embeddings=source,
            roles=roles,
        )
        progress.begin("auditing")
        figures = audit(pair.student, pair.teacher, matrix)
    console.print(audit_table(figures))
    write(matrix, arguments.output, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, build)
