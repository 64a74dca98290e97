"""Evaluation of a model that is already there."""

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerFast

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.load import to_yaml
from nemo_opd.evaluation.engines import open_engine, tokenizer_of
from nemo_opd.evaluation.questions import fitting, read_questions
from nemo_opd.evaluation.shown import all_answers
from nemo_opd.evaluation.table import estimates_table
from nemo_opd.evaluation.tasks import EvaluationResult, evaluate_task
from nemo_opd.files import write_atomically
from nemo_opd.logging.busy import busy
from nemo_opd.logging.samples import write_samples
from nemo_opd.models.load import load_config
from nemo_opd.rewards import build_reward
from nemo_opd.rollout.base import Generator, Sampling
from nemo_opd.rollout.chat import ConversationRenderer
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.environment import build_environment
from nemo_opd.rollout.hf import max_positions
from nemo_opd.rollout.installed import require_installed
from nemo_opd.rollout.prompts import Kept, Renderer
from nemo_opd.rollout.text import TextRenderer

NO_LIMIT = 1 << 30
"""Tokens of a sequence of a model that names none."""

_log = logging.getLogger(__name__)


def evaluate(config: EvaluationConfig, console: Console | None = None) -> EvaluationResult:
    """Asks, prints a table, and writes config.yaml, results.json and samples.jsonl into `output_dir`.

    Raises what reading the model and the questions, the engine, the environment and the reward raise.
    """
    console = console or Console()
    require_installed(config.rollout)
    output_dir = config.output_dir or default_output_dir()
    with ExitStack() as stack:
        reward = stack.enter_context(build_reward(config.reward))
        prompts = read_questions(config)
        model, tokenizer = load_config(config.model, key="model"), tokenizer_of(config)
        renderer = renderer_of(config, tokenizer)
        questions = fitting(prompts, renderer, config, max_positions(model))
        if questions.num_dropped:
            _log.warning("%d of %d questions are too long and left out", questions.num_dropped, len(prompts))
        with busy(f"loading {config.model}"):
            engine = stack.enter_context(open_engine(config, model, tokenizer, output_dir))
        max_length = max_positions(model) or NO_LIMIT
        likeliest = Sampling(temperature=0, needs_raw=False)
        greedy = collector(config, engine, renderer, likeliest, max_length) if config.greedy else None
        sampling = Sampling(config.temperature, config.top_p, config.top_k, needs_raw=False)
        sampled = collector(config, engine, renderer, sampling, max_length)
        start = time.monotonic()
        with busy(f"asking {len(questions.prompts):,} questions"):
            result = evaluate_task(greedy, sampled, questions.prompts, reward, config)
        seconds = time.monotonic() - start
    write_atomically(output_dir / "config.yaml", to_yaml(config).encode())
    write_samples(output_dir / "samples.jsonl", all_answers(result, step=0))
    write_atomically(output_dir / "results.json", results_json(config, result, questions, seconds).encode())
    console.print(estimates_table(result, config))
    console.print(f"wrote {output_dir}/results.json and samples.jsonl", soft_wrap=True)
    return result


def collector(
    config: EvaluationConfig, engine: Generator, renderer: Renderer, sampling: Sampling, max_length: int
) -> Collector:
    limits: dict[str, Any] = {}
    if config.environment is not None:
        limits = {
            "max_turns": config.environment.max_turns,
            "max_response_tokens": config.environment.max_response_tokens,
            "answer_timeout_s": config.environment.call_timeout_s,
        }
    return Collector(
        engine,
        renderer,
        sampling=sampling,
        max_new_tokens=config.max_new_tokens,
        max_length=max_length,
        environment=None if config.environment is None else build_environment(config.environment),
        seed=config.seed,
        **limits,
    )


def renderer_of(config: EvaluationConfig, tokenizer: PreTrainedTokenizerFast) -> Renderer:
    """Raises AlignmentError where questions are conversations and there is no chat template."""
    if config.data.messages_key is None:
        return TextRenderer(tokenizer)
    return ConversationRenderer(tokenizer, config.chat_template_kwargs)


def results_json(config: EvaluationConfig, result: EvaluationResult, questions: Kept, seconds: float) -> str:
    results = {
        "model": config.model,
        "num_questions": len(questions.prompts),
        "num_dropped": questions.num_dropped,
        "n": config.n,
        "confidence": config.confidence,
        "seconds": round(seconds, 3),
        "estimates": {name: asdict(estimate) for name, estimate in result.estimates.items()},
        "response_length": result.response_length,
        "truncation_rate": result.truncation_rate,
    }
    return json.dumps(results, indent=2) + "\n"


def default_output_dir() -> Path:
    return Path("outputs") / "evaluation" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
