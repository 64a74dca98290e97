#!/usr/bin/env python
"""Turns local files of the usual sets of questions into prompts with answers, for training and evaluation."""

import sys

# A script's folder comes first on its path; what it imports is named from the root.
if sys.path[0] == __file__.rpartition("/")[0]:
    sys.path[0] = __file__.rpartition("/tools/")[0]

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from nemo_opd.errors import DataError, OPDError
from tools.data import aime, dapo_math, gsm8k, math_500
from tools.data.questions import Distinct, Question, check_output, distinct, write
from tools.data.rows import Row, read_rows

BOXED = "Please reason step by step, and put your final answer within \\boxed{}."
EPILOG = """\
Nothing is downloaded: give the files as they are published, Parquet or JSON lines. What is written has the columns
messages (or text, with --text) and answer, beside source, id and what else the set knows; every problem once.

examples:
  uv run tools/data/prepare.py dapo_math --input dapo-math-17k.parquet --output dapo_math.parquet
  uv run tools/data/prepare.py aime_2025 --input aime2025-I.jsonl aime2025-II.jsonl --output aime_2025.jsonl
  uv run tools/data/prepare.py gsm8k --input test.parquet --output gsm8k.jsonl --instruction ''

Then: data.train.parquet_files=dapo_math.parquet data.messages_key=messages reward=math, or
  uv run examples/evaluate.py model=PATH_OR_HUB data.jsonl_files=aime_2025.jsonl reward=math n=8 k=[1,8]
"""


@dataclass(frozen=True, slots=True)
class Set:
    columns: Sequence[str]
    questions: Callable[[Iterator[Row]], Iterator[Question]]
    help: str
    num_expected: int | None = None


SETS = {
    "dapo_math": Set(dapo_math.COLUMNS, dapo_math.questions, "DAPO-Math-17k; repeated rows are left out"),
    "aime_2024": Set(aime.COLUMNS, partial(aime.questions, year=2024), "AIME 2024, I and II", aime.NUM_PROBLEMS),
    "aime_2025": Set(aime.COLUMNS, partial(aime.questions, year=2025), "AIME 2025, I and II", aime.NUM_PROBLEMS),
    "math_500": Set(math_500.COLUMNS, math_500.questions, "MATH-500", 500),
    "gsm8k": Set(gsm8k.COLUMNS, gsm8k.questions, "GSM8K, train or test"),
}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="set", required=True, metavar="SET")
    for name, each in SETS.items():
        command = commands.add_parser(name, help=each.help, description=each.help)
        command.add_argument("--input", required=True, nargs="+", type=Path, metavar="FILE", help="files of the set")
        command.add_argument("--output", required=True, type=Path, metavar="FILE", help="a .parquet or .jsonl file")
        command.add_argument(
            "--instruction", default=BOXED, metavar="TEXT", help=f"follows each problem; '' for none (default: {BOXED})"
        )
        command.add_argument(
            "--text", action="store_true", help="a column text to be continued, for models without a chat template"
        )
    return parser.parse_args(arguments)


def prepare(arguments: argparse.Namespace) -> Distinct:
    """Raises DataError where files are not of the set; nothing is written then."""
    check_output(arguments.output)
    chosen = SETS[arguments.set]
    found = distinct(chosen.questions(read_rows(arguments.input, chosen.columns)))
    if not found.questions:
        named = ", ".join(map(str, arguments.input))
        raise DataError(f"--input {named}: no questions of {arguments.set} are in there; check the files and the set")
    write(found.questions, arguments.output, instruction=arguments.instruction, as_text=arguments.text)
    return found


def described(found: Distinct, arguments: argparse.Namespace) -> Iterator[str]:
    count, expected = len(found.questions), SETS[arguments.set].num_expected
    yield f"wrote {arguments.output}: {count:,} questions"
    if found.num_repeated:
        yield f"left out as repeated: {found.num_repeated:,} rows whose problem came before"
    if found.num_contradicting:
        yield f"left out as contradicting: {found.num_contradicting:,} of the problems, which have several answers"
    if expected not in (None, count):
        yield f"warning: {arguments.set} has {expected} questions; are all files given, and of this set alone?"


def main(arguments: list[str] | None = None) -> int:
    parsed = parse(arguments)
    try:
        for line in described(prepare(parsed), parsed):
            print(line)
    except (OPDError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
