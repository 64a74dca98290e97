"""Continues prompts with a model, as a run samples from its student."""

from argparse import ArgumentParser, Namespace

from rich.console import Console

from nemo_opd.cli.command import Command
from nemo_opd.errors import ConfigError

EPILOG = """\
examples:
  nemo-opd generate --model demo:arithmetic_student --prompt '123+456=' --temperature 0
  nemo-opd generate --model outputs/demo/RUN/final --prompt 'Once upon a time' --n 3 --max-new-tokens 40
  nemo-opd generate --model Qwen/Qwen3-1.7B --chat --prompt 'How many primes are below 30?' --json
  printf 'one prompt\\nanother\\n' | nemo-opd generate --model outputs/demo/RUN/final
"""


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="a Hugging Face folder, hub name or demo: name")
    parser.add_argument("--tokenizer", metavar="TOKENIZER", help="folder or hub name (default: the model's)")
    parser.add_argument("--prompt", action="append", metavar="TEXT", help="may be repeated (default: lines of stdin)")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user message, in the chat template")
    parser.add_argument("--system", metavar="TEXT", help="with --chat: the system message before it")
    parser.add_argument("--n", type=int, default=1, help="samples per prompt (default %(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, metavar="N", help="default %(default)s")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help="0: the likeliest (default 1)")
    parser.add_argument("--top-p", type=float, default=1.0, metavar="P", help="default 1: from all tokens")
    parser.add_argument("--top-k", type=int, metavar="K", help="default: from all tokens")
    parser.add_argument("--seed", type=int, default=0, help="seed of sampling (default %(default)s)")
    parser.add_argument("--batch-size", type=int, default=64, metavar="N", help="sequences at a time (default 64)")
    parser.add_argument("--dtype", choices=("auto", "bfloat16", "float32"), default="auto", help="dtype of the model")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto", help="default: a GPU if any")
    parser.add_argument("--json", action="store_true", help="print each sample as one line of JSON")


def generate(arguments: Namespace, console: Console) -> None:
    """Sample and print. Raises ConfigError for arguments out of bounds, and the errors of loading and sampling."""
    bounds = {"n": 1, "max_new_tokens": 1, "batch_size": 1, "temperature": 0, "seed": 0}
    for name, least in bounds.items():
        if not (value := getattr(arguments, name)) >= least:  # also rejects NaN
            raise ConfigError(f"--{name.replace('_', '-')}={value}: must be at least {least}")
    if not 0 < arguments.top_p <= 1:
        raise ConfigError(f"--top-p={arguments.top_p:g}: must be above 0 and at most 1")
    if arguments.top_k is not None and arguments.top_k < 1:
        raise ConfigError(f"--top-k={arguments.top_k}: must be at least 1; leave it out to sample from all tokens")
    if arguments.system is not None and not arguments.chat:
        raise ConfigError("--system: a message of a conversation; add --chat")
    from nemo_opd.cli import samples

    samples.show(arguments, console)


COMMAND = Command(__doc__, EPILOG, add_arguments, generate)
