"""Evaluation of a finished model."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from transformers import GenerationConfig, PreTrainedTokenizerFast

from nemo_opd.cluster.local import driving, open_cluster
from nemo_opd.config.composition import to_yaml
from nemo_opd.config.evaluation import EvaluationConfig, Questions
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.teacher import SameTokenizerTeacher
from nemo_opd.data.row_types import Prompt
from nemo_opd.errors import AlignmentError, ConfigError
from nemo_opd.evaluation.benchmark_tasks import LoadedBenchmark, load_benchmarks
from nemo_opd.evaluation.estimates import Estimate
from nemo_opd.evaluation.likelihoods import longest_request
from nemo_opd.evaluation.question_sets import ResolvedSet, build_set_reward, resolved_sets
from nemo_opd.evaluation.questions import EvaluationResult, all_answers, ask, read_questions
from nemo_opd.extras import require_installed
from nemo_opd.files import write_atomically
from nemo_opd.logging.interface import figure, is_share, share
from nemo_opd.logging.scores import SAMPLE_LOG, SampleLog
from nemo_opd.logging.terminal import VisibleConsole, busy
from nemo_opd.models.folder import read_template, require_weights
from nemo_opd.models.load import load_config, load_tokenizer
from nemo_opd.models.parallelize import check_parallelism
from nemo_opd.models.token_trials import require_causal
from nemo_opd.preflight.ranks import colocated, require_processes, resolve_device, resolve_layout, resolve_ranks
from nemo_opd.rewards import RewardFunction
from nemo_opd.rollout.collect import drop_long
from nemo_opd.rollout.conversation import build_renderer
from nemo_opd.rollout.engine_interface import BatchLimit, EngineSpec, Generator
from nemo_opd.rollout.renderer import Renderer
from nemo_opd.rollout.server.server_process import server_gpus
from nemo_opd.rollout.transformers_engine import end_ids, max_positions
from nemo_opd.training.engines import ENGINES
from nemo_opd.training.groups import AnsweringModel, ModelGroup
from nemo_opd.workers.frozen import FrozenWorker
from nemo_opd.workers.out_of_memory import EVALUATED_TASKS

if TYPE_CHECKING:
    from nemo_opd.evaluation.benchmarks import BenchmarkResult

RESULTS = "results.json"
_MICRO_BATCH_TOKENS = 16_384
"""Benchmark tokens per microbatch of a rank."""
_NO_LIMIT = 1 << 30
"""Sequence length in tokens if the model's configuration has no limit."""
_log = logging.getLogger(__name__)


def evaluate(
    config: EvaluationConfig, console: Console | None = None, output_dir: Path | None = None
) -> dict[str, EvaluationResult]:
    """Evaluate as `drive` does; return an empty dict on torchrun ranks other than the driver."""
    with driving(config.cluster.on(config.device)) as is_driver:
        return drive(config, console or VisibleConsole(), output_dir) if is_driver else {}


def evaluation_folder(config: EvaluationConfig) -> Path:
    """Return `output_dir`, or a folder named after the time if it is not set."""
    return config.output_dir or Path("outputs") / "evaluation" / datetime.now().strftime("%Y-%m-%d_%H-%M-%S")


def drive(config: EvaluationConfig, console: Console, output_dir: Path | None = None) -> dict[str, EvaluationResult]:
    """Evaluate, print a table per set and benchmark, and return the results keyed by name of the set.

    Writes config.yaml, results.json and, if there are sets, samples.jsonl into `output_dir`, by default
    `evaluation_folder`. Results so far are written after each set and benchmark. Raises the errors of reading the model
    and the questions, and of engine, environment and reward.
    """
    require_installed(config.rollout)
    output_dir = output_dir or evaluation_folder(config)
    if (output_dir / "metrics.jsonl").exists():
        raise ConfigError(
            f"output_dir={output_dir} holds a run, whose config.yaml and samples.jsonl would be replaced; name another "
            f"directory, such as {output_dir / 'evaluation'}"
        )
    if (output_dir / RESULTS).exists():
        _log.warning("%s has the results of an earlier evaluation, which are replaced", output_dir)
    sets = list(resolved_sets(config, config.data, config.reward, ""))
    benchmarks = _load_benchmarks(config)
    with ExitStack() as stack:
        rewards = [stack.enter_context(build_set_reward(resolved)) for resolved in sets]
        questions = [read_questions(resolved) for resolved in sets]
        model, tokenizer = load_config(config.model, key="model"), _load_tokenizer(config)
        require_causal(model, config.model, key="model")
        require_weights(config.model, key="model")
        positions = max_positions(model)
        renderers = [_renderer(config, resolved, tokenizer) for resolved in sets]
        fitting = [
            _drop_long_questions(resolved, prompts, renderer, config, positions)
            for resolved, prompts, renderer in zip(sets, questions, renderers, strict=True)
        ]
        ends = end_ids(tokenizer, GenerationConfig.from_model_config(model))
        engine: Generator
        with busy(f"loading {config.model}"):
            if isinstance(config.rollout, HFRollout):
                engine = stack.enter_context(_open_model(config, len(tokenizer), ends))
            else:
                gpus = server_gpus(config.rollout)
                spec = EngineSpec(len(tokenizer), ends, config.dtype, output_dir, positions, gpus=gpus)
                opened = ENGINES[type(config.rollout)].for_model(config.rollout, spec, config.model, config.device)
                engine = stack.enter_context(opened)
        dropped = {
            resolved.name: len(prompts) - len(remaining)
            for resolved, prompts, remaining in zip(sets, questions, fitting, strict=True)
        }
        results: dict[str, EvaluationResult] = {}
        seconds: dict[str, float] = {}
        scored: list[BenchmarkResult] = []
        for resolved, prompts, renderer, reward in zip(sets, fitting, renderers, rewards, strict=True):
            start = time.monotonic()
            with busy(f"{resolved.label}: asking {len(prompts):,} questions"):
                results[resolved.name] = _ask(config, resolved, engine, renderer, prompts, reward, positions)
            seconds[resolved.name] = time.monotonic() - start
            samples = (answer for result in results.values() for answer in all_answers(result))
            SampleLog(output_dir / SAMPLE_LOG).replace(samples)
            _write_results(output_dir, config, results, dropped, seconds, scored)
        for benchmark in _run_benchmarks(config, benchmarks, tokenizer, positions, engine) if benchmarks else ():
            scored.append(benchmark)
            _write_results(output_dir, config, results, dropped, seconds, scored)
    for resolved in sets:
        console.print(_estimates_table(results[resolved.name], resolved.settings))
    for benchmark in scored:
        title = f"{benchmark.name}: {benchmark.num_questions:,} questions"
        console.print(_table(title, benchmark.estimates, config.confidence))
    written = f"{RESULTS} and samples.jsonl" if sets else RESULTS
    console.print(f"wrote {output_dir}/{written}", soft_wrap=True)
    return results


def _renderer(config: EvaluationConfig, resolved: ResolvedSet, tokenizer: PreTrainedTokenizerFast) -> Renderer:
    """Return the renderer of a set's questions. Raises AlignmentError for conversations without a chat template."""
    if resolved.is_chat and not tokenizer.chat_template:
        column = next(iter(resolved.prompt_key), "COLUMN")
        raise AlignmentError(
            f"model={config.model} has no chat template, which conversations need; write chat_template=plain, a "
            f"file, or {resolved.layout.settings['text_key']}={column} to continue texts"
        )
    return build_renderer(tokenizer, resolved.is_chat, config.chat_template_kwargs)


@contextmanager
def _open_model(config: EvaluationConfig, vocab_size: int, end_ids: Collection[int]) -> Iterator[AnsweringModel]:
    """Start the workers and load the model.

    Raises ConfigError if the ranks are not available, and the workers' ModelError and ClusterError.
    """
    assert isinstance(config.rollout, HFRollout)
    cluster = config.cluster.on(config.device)
    device = resolve_device(cluster, "device")
    placement = colocated(resolve_ranks(cluster, device), cluster.num_nodes)
    require_processes(cluster, placement, device)
    layout = resolve_layout("parallelism", len(placement.student), config.parallelism)
    check_parallelism(load_config(config.model, key="model"), config.parallelism, device, key="parallelism")
    settings = SameTokenizerTeacher(
        type="same_tokenizer",
        name="model",
        model=config.model,
        tokenizer=config.tokenizer,
        parallelism=config.parallelism,
        dtype=config.dtype,
    )
    arguments = {
        "settings": settings,
        "tasks": EVALUATED_TASKS,
        "key": "model",
        "vocab_size": vocab_size,
        "device": device,
    }
    with (
        open_cluster(cluster, device, placement) as running,
        running.group("model", FrozenWorker, arguments, placement.student) as group,
    ):
        running.gather([group.ready])
        yield AnsweringModel(
            ModelGroup(group, layout, _MICRO_BATCH_TOKENS), end_ids, BatchLimit(config.rollout.batch_size)
        )


def _ask(
    config: EvaluationConfig,
    resolved: ResolvedSet,
    engine: Generator,
    renderer: Renderer,
    questions: Sequence[Prompt],
    reward: RewardFunction,
    positions: int | None,
) -> EvaluationResult:
    result = ask(
        resolved,
        questions,
        reward,
        engine,
        renderer,
        max_new_tokens=resolved.settings.max_new_tokens or config.max_new_tokens,
        max_length=positions or _NO_LIMIT,
        environment=config.environment,
        seed=config.seed,
        failures_are_wrong=config.on_error == "warn",
    )
    if result.failures:
        _log.warning("%s", result.failure_text(resolved.label))
    return result


def _load_benchmarks(config: EvaluationConfig) -> tuple[LoadedBenchmark, ...]:
    """Load the benchmarks. Raises ConfigError with a rollout server: servers do not score given texts."""
    if not config.benchmarks:
        return ()
    if not isinstance(config.rollout, HFRollout):
        raise ConfigError(
            f"rollout.type={config.rollout.type}: benchmarks need likelihoods, which only workers compute; write "
            "rollout=hf, or leave benchmarks out"
        )
    return load_benchmarks(config, "")


def _run_benchmarks(
    config: EvaluationConfig,
    benchmarks: Sequence[LoadedBenchmark],
    tokenizer: PreTrainedTokenizerFast,
    positions: int | None,
    engine: Generator,
) -> Iterator[BenchmarkResult]:
    from nemo_opd.evaluation.benchmarks import LanguageModel, TextModel, run_benchmark

    assert isinstance(engine, AnsweringModel)
    text = TextModel(tokenizer, longest_request(config, positions), config.chat_template_kwargs, config.seed)
    model = LanguageModel(text, engine.likelihoods, engine)
    allows = config.confirm_run_unsafe_code
    for benchmark in benchmarks:
        with busy(f"benchmark {benchmark.settings.label}"):
            result = run_benchmark(benchmark, model, config.confidence, allows_code=allows)
        yield result


def _load_tokenizer(config: EvaluationConfig) -> PreTrainedTokenizerFast:
    """Load the tokenizer, with `chat_template` if it is set. Raises ModelError."""
    key, source = ("model", config.model) if config.tokenizer is None else ("tokenizer", config.tokenizer)
    tokenizer = load_tokenizer(source, key=key)
    if config.chat_template is not None:
        tokenizer.chat_template = read_template(config.chat_template, key="chat_template")
    return tokenizer


def _drop_long_questions(
    resolved: ResolvedSet, prompts: list[Prompt], renderer: Renderer, config: EvaluationConfig, positions: int | None
) -> tuple[Prompt, ...]:
    """Drop questions that leave no room for an answer in the model's positions (None: no limit).

    Raises DataError if no question remains.
    """
    new = resolved.settings.max_new_tokens or config.max_new_tokens
    limits = [config.max_prompt_length, None if positions is None else positions - new]
    way_out = (
        f"the model has {'unlimited' if positions is None else positions} positions, max_new_tokens={new} of them "
        f"for the answer, and max_prompt_length={config.max_prompt_length}; change one of these"
    )
    limit = min((limit for limit in limits if limit is not None), default=None)
    fitting = drop_long(prompts, renderer, limit, key=resolved.key, way_out=way_out)
    if num_dropped := len(prompts) - len(fitting):
        counts = num_dropped, len(prompts)
        _log.warning("%s: %d of %d questions are too long and were left out", resolved.label, *counts)
    return fitting


def _write_results(
    output_dir: Path,
    config: EvaluationConfig,
    results: Mapping[str, EvaluationResult],
    dropped: Mapping[str, int],
    seconds: Mapping[str, float],
    benchmarks: Sequence[BenchmarkResult],
) -> None:
    """Write results.json: the unnamed set at the top level, named sets under `sets`, then benchmarks."""
    by_set = {
        name: {
            "num_questions": len(result.questions),
            "num_dropped": dropped[name],
            "n": config.all_sets[name].n,
            "confidence": config.all_sets[name].confidence,
            "seconds": round(seconds[name], 3),
            "estimates": {measure: asdict(estimate) for measure, estimate in result.estimates.items()},
            **_by_level(result),
            "response_length": result.response_length,
            "truncation_rate": result.truncation_rate,
        }
        for name, result in results.items()
    }
    unnamed = by_set.pop("", {})
    content: dict[str, Any] = {"model": config.model, **unnamed} | ({"sets": by_set} if by_set else {})
    if benchmarks:
        content["benchmarks"] = {
            benchmark.name: {
                "num_questions": benchmark.num_questions,
                "confidence": config.confidence,
                "estimates": {metric: asdict(estimate) for metric, estimate in benchmark.estimates.items()},
            }
            for benchmark in benchmarks
        }
    write_atomically(output_dir / "config.yaml", to_yaml(config).encode())
    write_atomically(output_dir / RESULTS, (json.dumps(content, indent=2) + "\n").encode())


def _by_level(result: EvaluationResult) -> dict[str, Any]:
    """Return each measure's mean over the questions of each level; empty if no column names levels."""
    rows: dict[str, list[int]] = {}
    for row, level in enumerate(result.levels):
        rows.setdefault(level, []).append(row)
    means = {
        level: {
            "num_questions": len(level_rows),
            **{measure: fmean(values[row] for row in level_rows) for measure, values in result.values.items()},
        }
        for level, level_rows in rows.items()
    }
    return {"by_level": means} if means else {}


def _estimates_table(result: EvaluationResult, settings: Questions) -> Table:
    """Return a table with a row per estimate and its interval, then answer length and truncation.

    Shares are in per cent; the mean reward is a plain number unless all rewards are between 0 and 1.
    """
    named = f"{result.name}: " * bool(result.name)
    title = f"{named}{len(result.questions):,} questions, {settings.n:,} sampled answers each"
    are_shares = all(0 <= answer.reward <= 1 for question in result.questions for answer in question.sampled)
    plain = () if are_shares else tuple(name for name in result.estimates if name.startswith("mean@"))
    table = _table(title, result.estimates, settings.confidence, plain)
    table.add_section()
    table.add_row("response length", f"{result.response_length:.1f}", "tokens")
    table.add_row("truncated", share(result.truncation_rate), "of sampled answers")
    return table


def _table(title: str, estimates: Mapping[str, Estimate], confidence: float, plain: Collection[str] = ()) -> Table:
    """Return a table of estimates. plain: names of estimates to show as numbers although they are between 0 and 1."""
    table = Table(title=title)
    table.add_column("figure")
    table.add_column("value", justify="right")
    table.add_column(f"{100 * confidence:.4g} % interval", justify="right")
    for name, estimate in estimates.items():
        is_percentage = name not in plain and is_share(name, estimate.value, estimate.low, estimate.high)
        form = share if is_percentage else figure
        table.add_row(name, form(estimate.value), f"{form(estimate.low)} to {form(estimate.high)}")
    return table
