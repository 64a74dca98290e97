"""Step 1 of a projection: student tokens with a partner of the same bytes, special tokens by role."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_output, add_pair, add_roles, check_output, roles_of
from nemo_opd.cli.projection.steps import steps, write

EPILOG = """\
Two tokens are partners if they stand for the same bytes: 'Ġthe' of a byte-level vocabulary and '▁the' of a
SentencePiece one are both ' the'. Each token gets at most one partner. Special tokens have no bytes and are paired by
role: <|eot_id|> and <|im_end|> both end a turn. All other rows stay empty; multi-token fills them.

Stop here for a map with only the tokens that both sides share, as the loss strict compares.

example:
  nemo-opd projection exact-map --student demo:student --teacher demo:teacher_cross --output exact.safetensors
      wrote exact.safetensors: 2,029 of 2,048 rows, 2,029 exact, up to 1 teacher tokens each (0.0 MB)
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_pair(parser, required=True)
    add_output(parser)
    add_roles(parser)


def build(arguments: Namespace, console: Console) -> None:
    check_output(arguments.output)
    roles = roles_of(arguments.roles)
    from nemo_opd.cli.projection.pair import load_pair
    from nemo_opd.projection import exact_map

    pair = load_pair(arguments.student, arguments.teacher)
    with steps(console) as progress:
        progress.begin("pairing tokens")
        matrix = exact_map(pair.student, pair.teacher, roles=roles)
    write(matrix, arguments.output, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, build)
