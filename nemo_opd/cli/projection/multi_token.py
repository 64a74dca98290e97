"""Step 2 of a projection: student tokens without a partner, spelled with teacher tokens."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_file, add_output, add_pair, check_output
from nemo_opd.cli.projection.steps import steps, write

EPILOG = """\
The teacher writes '885' as '8', '8', '5'. The row gets these pieces with weights falling by ten: 0.9, 0.09, 0.009,
added up if a piece repeats and scaled to sum 1. The first piece weighs most, because it is the teacher's next token
when the student writes '885'.

--reverse (step 3) also spells each teacher token without a partner with student tokens, and adds the reversed entries
to the rows of these student tokens, the first with the largest weight: more teacher tokens are reached.

example:
  nemo-opd projection multi-token exact.safetensors --output spelled.safetensors
      wrote spelled.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 2 teacher tokens each (0.1 MB)
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_file(parser, "a file written by exact-map")
    add_output(parser)
    parser.add_argument(
        "--width", type=int, default=8, metavar="N", help="entries kept per row until sort-and-cut (default 8)"
    )
    parser.add_argument("--reverse", action="store_true", help="also add the spellings of teacher tokens (step 3)")
    add_pair(parser, required=False)


def build(arguments: Namespace, console: Console) -> None:
    check_output(arguments.output)
    from nemo_opd.cli.projection.pair import load_file
    from nemo_opd.projection import add_multi_token

    matrix, pair = load_file(arguments)
    with steps(console) as progress:
        matrix = add_multi_token(
            matrix,
            pair.student,
            pair.teacher,
            width=arguments.width,
            reverse=arguments.reverse,
            progress=progress.begin("spelling tokens"),
        )
    write(matrix, arguments.output, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, build)
