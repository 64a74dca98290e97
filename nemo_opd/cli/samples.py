"""Printing of a model's samples."""

import json
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import GenerationConfig

from nemo_opd.alignment.chat_messages import content_text
from nemo_opd.config.rollout import HFRollout
from nemo_opd.data.record import Message, Prompt, Rollout
from nemo_opd.errors import ConfigError
from nemo_opd.models.load import load_config, load_tokenizer
from nemo_opd.models.token_trials import require_causal
from nemo_opd.rollout.base import EngineSpec, Sampling
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.conversation import build_renderer
from nemo_opd.rollout.hf import end_ids, for_model, max_positions

_NO_LIMIT = 1 << 30
"""Maximum sequence length of a model whose configuration sets no limit."""


def show(arguments: Namespace, console: Console) -> None:
    """Sample, and print prompts and responses. Raises the errors of model loading and sampling."""
    prompts = list(_prompts(arguments))
    if not prompts:
        raise ConfigError("no prompt: pass --prompt, or pipe lines to stdin")
    config = load_config(arguments.model, key="--model")
    require_causal(config, arguments.model, key="--model")
    key, source = ("--model", arguments.model) if arguments.tokenizer is None else ("--tokenizer", arguments.tokenizer)
    tokenizer = load_tokenizer(source, key=key)
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


def _prompts(arguments: Namespace) -> Iterator[Prompt]:
    texts = arguments.prompt or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    system: list[Message] = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    for i, text in enumerate(texts):
        yield Prompt(i, [*system, {"role": "user", "content": text}] if arguments.chat else text)


def _print(rollout: Rollout, arguments: Namespace, console: Console) -> None:
    response, content = rollout.responses[-1], rollout.prompt.content
    prompt = content if isinstance(content, str) else content_text(content[-1])
    if arguments.json:
        facts = {"prompt": prompt, "sample": rollout.sample, "response": response}
        facts |= {"finish_reason": rollout.finish_reason, "tokens": rollout.num_sampled}
        print(json.dumps(facts, ensure_ascii=False))
        return
    plain: dict[str, Any] = {"markup": False, "highlight": False, "soft_wrap": True}
    console.print(prompt, style="dim", end="\n" if arguments.chat else "", **plain)
    console.print(response, **plain)
