"""Gives a model another tokenizer: new rows of its embeddings and head, computed from the old ones."""

from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.console import Console

from nemo_opd.cli.command import Command, require_at_least
from nemo_opd.cli.projection import add_roles, roles_of
from nemo_opd.config.data import source_of
from nemo_opd.config.run_fields import LARGEST_SEED
from nemo_opd.errors import ConfigError


def _add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a Hugging Face folder, hub name or demo: name")
    parser.add_argument("--tokenizer", required=True, help="the new one: a folder, hub name or demo: name")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR", help="a new folder, or an empty one")
    parser.add_argument(
        "--weighting",
        choices=("uniform", "bytes", "first", "last"),
        default="bytes",
        help="weights of the old tokens that spell a new one: equal, by their bytes, or 0.9, 0.09, … from the first or "
        "the last (default %(default)s)",
    )
    parser.add_argument(
        "--random",
        choices=("all", "unmatched"),
        help="a baseline: draw all rows, or only unmatched ones (no old token has the bytes or the role), from a "
        "normal distribution with the old rows' mean and standard deviation in each dimension",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of --random (default %(default)s)")
    parser.add_argument(
        "--pad-to-multiple", type=int, default=1, metavar="N", help="pad the rows to a multiple of N (default 1)"
    )
    add_roles(parser)
    parser.add_argument("--chat-template", metavar="FILE", help="Jinja template (default: the new tokenizer's own)")
    parser.add_argument(
        "--text",
        nargs="+",
        default=[],
        metavar="FILE",
        help="texts for measuring bits per byte before and after: Arrow, Parquet or JSONL files with a column of "
        "texts, or files with one text each",
    )
    parser.add_argument("--text-key", default="text", metavar="COLUMN", help="column of --text (default %(default)s)")
    parser.add_argument(
        "--max-length", type=int, default=512, metavar="N", help="tokens per window of --text (default %(default)s)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cuda", "cpu"), default="auto", help="device for --text (default: a GPU)"
    )


def _run(arguments: Namespace, console: Console) -> None:
    """Transplant the tokenizer. Raises ConfigError for arguments out of bounds, and the errors of `transplant`."""
    require_at_least(arguments, pad_to_multiple=1, max_length=2, seed=0)
    if arguments.seed > LARGEST_SEED:
        raise ConfigError(f"--seed={arguments.seed}: must be at most {LARGEST_SEED}")
    roles = roles_of(arguments.roles)
    source = source_of(arguments.text, key="--text", otherwise="text_files") if arguments.text else None
    from nemo_opd.data.columns import text_layout
    from nemo_opd.data.document_sources import load_documents
    from nemo_opd.data.row_types import TEXT
    from nemo_opd.logging.terminal import busy
    from nemo_opd.transplant import transplant

    layout = text_layout(arguments.text_key, {"text_key": "--text-key"})
    with busy(f"transplanting {arguments.model}"):
        texts = load_documents(source, layout, key="--text")[TEXT] if source else ()
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


COMMAND = Command(
    __doc__,
    """\
A token with the bytes of an old token gets an exact copy of its row; a special token the row of the old token with its
role; any other token a weighted sum of the rows of the old tokens that spell its bytes. Tokens that cannot be spelled
get the mean of all rows and are listed in transplant.json. No other weight changes. Files are rewritten one by one, so
the whole model is in memory only for --text.

The model must then learn to read and write these tokens: distil the original into it, as a teacher with another
tokenizer. docs/transplant.md has the settings.

examples:
  nemo-opd transplant --model demo:teacher_cross --tokenizer demo:student --output transplanted --text demo:validation
  nemo-opd transplant --model Qwen/Qwen3-0.6B --tokenizer meta-llama/Llama-3.2-1B --output qwen_llama
  nemo-opd transplant --model MODEL --tokenizer TOKENIZER --output baseline --random all --seed 1
""",
    _add_arguments,
    _run,
)
