"""Continues prompts with a model, as a run samples from its student."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from nemo_opd.cli.command import Command, print_plain, require_at_least
from nemo_opd.errors import ConfigError

if TYPE_CHECKING:
    from nemo_opd.data.row_types import Message, Prompt, Rollout

_NO_LIMIT = 1 << 30
"""Maximum sequence length of a model whose configuration sets no limit."""


def _add_arguments(parser: ArgumentParser) -> None:
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


def _generate(arguments: Namespace, console: Console) -> None:
    """Sample and print. Raises ConfigError for arguments out of bounds, and the errors of loading and sampling."""
    _check(arguments)
    from transformers import GenerationConfig

    from nemo_opd.config.rollout import HFRollout
    from nemo_opd.models.folder import require_weights
    from nemo_opd.models.load import load_config, load_tokenizer
    from nemo_opd.models.token_trials import require_causal
    from nemo_opd.rollout.collect import Collector
    from nemo_opd.rollout.conversation import build_renderer
    from nemo_opd.rollout.engine_interface import EngineSpec, Sampling
    from nemo_opd.rollout.transformers_engine import end_ids, for_model, max_positions

    prompts = list(_prompts(arguments))
    if not prompts:
        raise ConfigError("no prompt: pass --prompt, or pipe lines to stdin")
    config = load_config(arguments.model, key="--model")
    require_causal(config, arguments.model, key="--model")
    require_weights(arguments.model, key="--model")
    key, source = ("--model", arguments.model) if arguments.tokenizer is None else ("--tokenizer", arguments.tokenizer)
    tokenizer = load_tokenizer(source, key=key)
    if arguments.chat and not tokenizer.chat_template:
        raise ConfigError(
            f"{key}={source} has no chat template, which --chat needs; leave out --chat, or name the instruct model "
            "as --tokenizer"
        )
    ends, positions = end_ids(tokenizer, GenerationConfig.from_model_config(config)), max_positions(config)
    spec = EngineSpec(len(tokenizer), ends, arguments.dtype, Path(), positions)
    settings = HFRollout(batch_size=arguments.batch_size)
    with for_model(settings, spec, arguments.model, arguments.device) as engine:
        collector = Collector(
            engine,
            build_renderer(tokenizer, arguments.chat),
            sampling=Sampling(arguments.temperature, arguments.top_p, arguments.top_k, needs_raw=False),
            max_new_tokens=arguments.max_new_tokens,
            max_length=positions or _NO_LIMIT,
            seed=arguments.seed,
        )
        for rollout in collector.collect(prompts, arguments.n, step=0):
            _print(rollout, arguments, console)


def _check(arguments: Namespace) -> None:
    """Raise ConfigError for arguments out of bounds."""
    require_at_least(arguments, n=1, max_new_tokens=1, batch_size=1, temperature=0, seed=0)
    if not 0 < arguments.top_p <= 1:
        raise ConfigError(f"--top-p={arguments.top_p:g}: must be above 0 and at most 1")
    if arguments.top_k is not None and arguments.top_k < 1:
        raise ConfigError(f"--top-k={arguments.top_k}: must be at least 1; leave it out to sample from all tokens")
    if arguments.system is not None and not arguments.chat:
        raise ConfigError("--system: a message of a conversation; add --chat")


def _prompts(arguments: Namespace) -> Iterator[Prompt]:
    from nemo_opd.data.row_types import Prompt

    texts = arguments.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    system: list[Message] = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    for i, text in enumerate(texts):
        yield Prompt(i, [*system, {"role": "user", "content": text}] if arguments.chat else text)


def _print(rollout: Rollout, arguments: Namespace, console: Console) -> None:
    from nemo_opd.alignment.chat_template import content_text
    from nemo_opd.logging.terminal import visible_json

    response, content = rollout.responses[-1], rollout.prompt.content
    prompt = content if isinstance(content, str) else content_text(content[-1])
    if arguments.json:
        facts = {"prompt": prompt, "sample": rollout.sample, "response": response}
        facts |= {"finish_reason": rollout.finish_reason, "tokens": rollout.num_sampled}
        print(visible_json(facts))
        return
    print_plain(console, prompt, style="dim", end="\n" if arguments.chat else "")
    print_plain(console, response)


COMMAND = Command(
    __doc__,
    """\
examples:
  nemo-opd generate --model demo:arithmetic_student --prompt $'123 + 456 = ?\\n' --temperature 0
  nemo-opd generate --model outputs/demo/RUN/final --prompt 'Once upon a time' --n 3 --max-new-tokens 40
  nemo-opd generate --model Qwen/Qwen3-1.7B --chat --prompt 'How many primes are below 30?' --json
  printf 'one prompt\\nanother\\n' | nemo-opd generate --model outputs/demo/RUN/final
""",
    _add_arguments,
    _generate,
)
