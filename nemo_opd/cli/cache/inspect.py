"""Shows the contents of a teacher cache, the stored output for a text, and whether the files are undamaged."""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command

EPILOG = """\
examples:
  nemo-opd cache inspect qwen
      …
      │ bytes per token │ 399.2                                        │
  nemo-opd cache inspect qwen --verify     every segment is read and compared with its checksum
  nemo-opd cache inspect qwen --segment 0  the likeliest tokens of the first text
  nemo-opd cache inspect qwen --json | jq .tokens
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("cache", type=Path, metavar="DIR", help="a folder written by `cache build`")
    parser.add_argument("--verify", action="store_true", help="read everything and compare checksums")
    parser.add_argument(
        "--segment", type=_number, metavar="N", help="print segment N of the first shard with more than N"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as one JSON object")


def _number(text: str) -> int:
    if not text.isdecimal():
        raise ArgumentTypeError(f"{text}: write a number from 0")
    return int(text)


def show(arguments: Namespace, console: Console) -> None:
    from nemo_opd.cli.cache import look

    look.show(arguments, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, show)
