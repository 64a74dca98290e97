"""Shows a projection file: the coverage audit, special tokens by role, sample rows, a heat map."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_file, add_pair
from nemo_opd.config.loss import LossTerm
from nemo_opd.config.problems import models_in

EPILOG = """\
Points to check:
  overlap            share of the vocabulary that both sides have; published pairs are between 0.63 and 0.85
  N-digit numerals   exact pairs for all of them: h_kl works; for some lengths only: p_kl
  rows of 0          student tokens that learn nothing from this teacher (special tokens without a partner)
  special tokens     the ends of text and turn need a partner, or the student does not learn to stop
  sample rows        a row leads only to the pieces that spell its token

examples:
  nemo-opd projection inspect pair.safetensors
      …
      │ overlap          │         0.991 │ shared tokens / smaller vocabulary                         │
      …
      │ numerals      │ '64'                         │       │ '6' 0.909   '4' 0.0909         │
  nemo-opd projection inspect pair.safetensors --plot pair.png
  nemo-opd projection inspect pair.safetensors --loss h_kl
      h_kl compares exact pairs, but only 0 of 15 numerals of 2 digits and …
  nemo-opd projection inspect pair.safetensors --json | jq .overlap
      0.99072265625
"""


def add_arguments(parser: ArgumentParser) -> None:
    add_file(parser, "a projection, or a .pt file of NeMo-RL")
    add_pair(parser, required=False)
    parser.add_argument(
        "--json", action="store_true", help="print audit, roles, builder options and samples as one JSON object"
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="write a heat map of the sample rows")
    parser.add_argument(
        "--samples", type=int, default=6, metavar="N", help="sample rows of each kind of token (default 6)"
    )
    parser.add_argument(
        "--loss",
        choices=[term.model_fields["type"].default for term in models_in(LossTerm)],
        metavar="TYPE",
        help="explain why a loss of this type, such as h_kl, fits the pair badly",
    )


def show(arguments: Namespace, console: Console) -> None:
    from nemo_opd.cli.projection import look

    look.show(arguments, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, show)
