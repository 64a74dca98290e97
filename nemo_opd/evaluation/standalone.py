"""Evaluation of a finished model."""

import json
import logging
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedTokenizerFast

from nemo_opd.config.evaluation import EvaluationConfig
from nemo_opd.config.load import to_yaml
from nemo_opd.data.prompts import read_prompts
from nemo_opd.data.record import Prompt
from nemo_opd.data.sources import load_documents
from nemo_opd.evaluation.inputs import layout_of
from nemo_opd.evaluation.shown import all_answers
from nemo_opd.evaluation.tasks import EvaluationResult, evaluate_task
from nemo_opd.files import write_atomically
from nemo_opd.logging.busy import busy
from nemo_opd.logging.formats import figure, share
from nemo_opd.logging.samples import write_samples
from nemo_opd.models.folder import read_template
from nemo_opd.models.load import load_config, load_tokenizer
from nemo_opd.rewards import build_reward, check_answers
from nemo_opd.rollout.base import EngineSpec, Sampling
from nemo_opd.rollout.collect import Collector
from nemo_opd.rollout.conversation import build_renderer
from nemo_opd.rollout.engines import ENGINES
from nemo_opd.rollout.environments import build_environment
from nemo_opd.rollout.hf import end_ids, max_positions
from nemo_opd.rollout.installed import require_installed
from nemo_opd.rollout.prompts import Kept, drop_long
from nemo_opd.rollout.renderer import Renderer
from nemo_opd.rollout.server.gpus import server_gpus

_NO_LIMIT = 1 << 30
"""Tokens of a sequence of a model whose configuration names no limit."""

_log = logging.getLogger(__name__)


def evaluate(config: EvaluationConfig, console: Console | None = None) -> EvaluationResult:
    """Evaluate, print a table, and write config.yaml, results.json and samples.jsonl into `output_dir`.

    Raises what reading the model and the questions, the engine, the environment and the reward raise.
    """
    console = console or Console()
    require_installed(config.rollout)
    output_dir = config.output_dir or _default_output_dir()
    with ExitStack() as stack:
        reward = stack.enter_context(build_reward(config.reward))
        prompts = _read_questions(config)
        model, tokenizer = load_config(config.model, key="model"), _load_tokenizer(config)
        positions = max_positions(model)
        renderer = build_renderer(tokenizer, config.data.messages_key is not None, config.chat_template_kwargs)
        questions = _fitting(prompts, renderer, config, positions)
        if questions.num_dropped:
            _log.warning("%d of %d questions are too long and left out", questions.num_dropped, len(prompts))
        ends = end_ids(tokenizer, GenerationConfig.from_model_config(model))
        gpus = server_gpus(config.rollout)
        spec = EngineSpec(len(tokenizer), ends, config.dtype, output_dir, positions, gpus=gpus)
        with busy(f"loading {config.model}"):
            opened = ENGINES[type(config.rollout)].for_model(config.rollout, spec, config.model, config.device)
            engine = stack.enter_context(opened)
        collector = partial(
            Collector,
            engine,
            renderer,
            max_new_tokens=config.max_new_tokens,
            max_length=positions or _NO_LIMIT,
            environment=None if config.environment is None else build_environment(config.environment),
            seed=config.seed,
        )
        greedy = collector(sampling=Sampling(temperature=0, needs_raw=False)) if config.greedy else None
        sampled = collector(sampling=Sampling(config.temperature, config.top_p, config.top_k, needs_raw=False))
        start = time.monotonic()
        with busy(f"asking {len(questions.prompts):,} questions"):
            result = evaluate_task(greedy, sampled, questions.prompts, reward, config)
        seconds = time.monotonic() - start
    write_atomically(output_dir / "config.yaml", to_yaml(config).encode())
    write_samples(output_dir / "samples.jsonl", all_answers(result, step=0))
    write_atomically(output_dir / "results.json", _results_json(config, result, questions, seconds).encode())
    console.print(_estimates_table(result, config))
    console.print(f"wrote {output_dir}/results.json and samples.jsonl", soft_wrap=True)
    return result


def _read_questions(config: EvaluationConfig) -> list[Prompt]:
    """Raise DataError, with the row, for a question that cannot be read or does not fit the reward."""
    documents = load_documents(config.data, layout_of(config), key="data")
    prompts = read_prompts(documents, range(len(documents)))
    check_answers(config.reward, prompts, source="data")
    return prompts


def _load_tokenizer(config: EvaluationConfig) -> PreTrainedTokenizerFast:
    """Load the tokenizer, with the chat template that the settings name. Raises ModelError."""
    key, source = ("model", config.model) if config.tokenizer is None else ("tokenizer", config.tokenizer)
    tokenizer = load_tokenizer(source, key=key)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template, key="chat_template")
    return tokenizer


def _fitting(prompts: list[Prompt], renderer: Renderer, config: EvaluationConfig, positions: int | None) -> Kept:
    """Return the questions that leave room for an answer in the model's positions, None being any number.

    Raises DataError where none is left.
    """
    limits = [config.max_prompt_length, None if positions is None else positions - config.max_new_tokens]
    way_out = (
        f"the model has {'any number of' if positions is None else positions} positions, "
        f"max_new_tokens={config.max_new_tokens} of them are for the answer, and "
        f"max_prompt_length={config.max_prompt_length}; change one of these"
    )
    limit = min((limit for limit in limits if limit is not None), default=None)
    return drop_long(prompts, renderer, limit, key="data", way_out=way_out)


def _results_json(config: EvaluationConfig, result: EvaluationResult, questions: Kept, seconds: float) -> str:
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


def _default_output_dir() -> Path:
    return Path("outputs") / "evaluation" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def _estimates_table(result: EvaluationResult, config: EvaluationConfig) -> Table:
    """Return a table with a row for each estimate and its interval, then the lengths of answers.

    Shares are in per cent; a mean reward is a plain number where a reward is not between 0 and 1.
    """
    table = Table(title=f"{len(result.questions):,} questions, {config.n:,} sampled answers each")
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column(f"{100 * config.confidence:.4g} % interval", justify="right")
    are_shares = all(0 <= answer.reward <= 1 for question in result.questions for answer in question.sampled)
    for name, estimate in result.estimates.items():
        form = share if are_shares or not name.startswith("mean@") else figure
        table.add_row(name, form(estimate.value), f"{form(estimate.low)} to {form(estimate.high)}")
    table.add_section()
    table.add_row("response length", f"{result.response_length:.1f}", "tokens")
    table.add_row("truncated", share(result.truncation_rate), "of sampled answers")
    return table
