"""Gives a model another tokenizer: new rows of its embeddings and head, made of the old ones."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.cli.projection.arguments import add_roles, roles_of
from nemo_opd.config.data import source_of
from nemo_opd.config.run_fields import LARGEST_SEED
from nemo_opd.errors import ConfigError

EPILOG = """\
A token with the bytes of an old one has its row, to the bit; a special token that of the old one with its role; any
other token a weighted sum of the rows of the old tokens that spell its bytes. What no old token reaches gets the mean
of all rows and is listed in transplant.json. No other weight changes. Files are rewritten one by one, so a model is
never in memory as a whole, except for --text.

The model then has to learn to read and write these tokens: distil the original into it, as a teacher with another
tokenizer. docs/transplant.md has the settings.

examples:
  nemo-opd transplant --model demo:teacher_cross --tokenizer demo:student --output transplanted --text demo:validation
  nemo-opd transplant --model Qwen/Qwen3-0.6B --tokenizer meta-llama/Llama-3.2-1B --output qwen_llama
  nemo-opd transplant --model MODEL --tokenizer TOKENIZER --output baseline --random all --seed 1
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a Hugging Face folder, hub name or demo: name")
    parser.add_argument("--tokenizer", required=True, help="the new one: a folder, hub name or demo: name")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new folder, or an empty one")
    parser.add_argument(
        "--weighting",
        choices=("uniform", "bytes", "first", "last"),
        default="bytes",
        help="what the old tokens that spell a new one count for: the same, by their bytes, or 0.9, 0.09, … from the "
        "first or the last (default %(default)s)",
    )
    parser.add_argument(
        "--random",
        choices=("all", "unmatched"),
        help="a baseline: draw all rows, or those without an old token of their bytes or role, from a normal with the "
        "mean and standard deviation of each dimension of the old rows",
    )
    parser.add_argument("--seed", type=int, default=0, help="of --random (default %(default)s)")
    parser.add_argument(
        "--pad-to-multiple", type=int, default=1, metavar="N", help="fill up the rows to a multiple (default 1)"
    )
    add_roles(parser)
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template (default: the new tokenizer's own)")
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts to measure bits per byte on, before and after: Arrow, Parquet or JSONL files with a column of "
        "texts, or files that are one text each",
    )
    parser.add_argument("--text-key", default="text", metavar="COLUMN", help="column of --text (default %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="tokens of a window of --text (default %(default)s)"
    )
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="of --text (default: a GPU)")


def run(arguments: Namespace, console: Console) -> None:
    """Transplant the tokenizer. Raises ConfigError for arguments outside their bounds, and what `transplant` raises."""
    for name, least in {"pad_to_multiple": 1, "max_length": 2, "seed": 0}.items():
        if (value := getattr(arguments, name)) < least:
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be {least} at least")
    if arguments.seed > LARGEST_SEED:
        raise ConfigError(f"--seed={arguments.seed}: must be {LARGEST_SEED} at most")
    roles = roles_of(arguments.roles)
    source = source_of(arguments.text, key="--text", otherwise="text_files") if arguments.text else None
    from nemo_opd.data.documents import TEXT
    from nemo_opd.data.layout import TextLayout
    from nemo_opd.data.sources import load_documents
    from nemo_opd.logging.busy import busy
    from nemo_opd.transplant import transplant

    with busy(f"transplanting {arguments.model}"):
        texts = load_documents(source, TextLayout(arguments.text_key), key="--text")[TEXT] if source else ()
        result = transplant(
            arguments.model,
            arguments.tokenizer,
            arguments.output,
            weighting=arguments.weighting,
            random=arguments.random,
            seed=arguments.seed,
            pad_to_multiple=arguments.pad_to_multiple,
            roles=roles,
            chat_template=arguments.chat_template,
            texts=texts,
            max_length=arguments.max_length,
            device=arguments.device,
        )
    console.print(result.table())
    for note in result.notes():
        print(note)
    print(f"wrote {arguments.output}: {arguments.model} with the tokenizer of {arguments.tokenizer}")


COMMAND = Command(__doc__, EPILOG, add_arguments, run)
