"""Step 5 of a projection: the heaviest K entries of each row, heaviest first, scaled to sum 1."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_file, add_output, add_top_k, check_output
from nemo_opd.cli.projection.steps import steps, write

EPILOG = """\
The cost of a loss grows with the columns of the matrix, and four are enough: the i-th piece of a spelled token weighs
0.9 · 0.1^i, so all pieces after the fourth are less than a ten-thousandth of the row. Empty rows stay empty.

example:
  nemo-opd projection sort-and-cut near.safetensors --top-k 4 --output cut.safetensors
      wrote cut.safetensors: 2,048 of 2,048 rows, 2,029 exact, up to 4 teacher tokens each (0.1 MB)
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_file(parser)
    add_output(parser)
    add_top_k(parser, default=None)


def build(arguments: Namespace, console: Console) -> None:
    check_output(arguments.output)
    from nemo_opd.projection import ProjectionMatrix, sort_and_cut

    with steps(console) as progress:
        progress.begin("cutting rows")
        matrix = sort_and_cut(ProjectionMatrix.load(arguments.file), arguments.top_k)
    write(matrix, arguments.output, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, build)
