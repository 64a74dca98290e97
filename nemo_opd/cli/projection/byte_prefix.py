"""Last step of a projection: the prefix maps for the losses byte_prefix and shared_prefix."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_file, add_output, add_pair, check_output
from nemo_opd.cli.projection.steps import steps, write

EPILOG = """\
Adds three maps to the file; the rows are unchanged.
  byte prefix Φ       teacher token → the longest student token that its bytes begin with: 'recognition' → 'recogn'
  shared prefix Ψ     a token of either side → the longest token of both vocabularies that its bytes begin with

If a vocabulary has all single bytes, every token with bytes has such a prefix, so all the mass of a distribution can be
moved. Special tokens are mapped by role.

example:
  nemo-opd projection byte-prefix cut.safetensors --output pair.safetensors
      byte prefix: 3,050 of 3,050 teacher tokens; shared prefix: 2,048 of 2,048 student and 3,050 of 3,050 …
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_file(parser)
    add_output(parser)
    add_pair(parser, required=False)


def build(arguments: Namespace, console: Console) -> None:
    check_output(arguments.output)
    from nemo_opd.cli.projection.pair import load_file
    from nemo_opd.projection import add_byte_prefix, add_shared_prefix

    matrix, pair = load_file(arguments)
    with steps(console) as progress:
        progress.begin("finding prefixes")
        matrix = add_byte_prefix(matrix, pair.student, pair.teacher)
        matrix = add_shared_prefix(matrix, pair.student, pair.teacher)
    maps = (matrix.byte_prefix, matrix.student_shared_prefix, matrix.teacher_shared_prefix)
    phi, student, teacher = (f"{int((ids >= 0).sum()):,} of {len(ids):,}" for ids in maps if ids is not None)
    console.print(
        f"byte prefix: {phi} teacher tokens; shared prefix: {student} student and {teacher} teacher tokens",
        highlight=False,
        soft_wrap=True,
    )
    write(matrix, arguments.output, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, build)
