"""A model's metrics on lm-eval benchmarks."""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment.templates import apply_template
from nemo_opd.config.evaluation import DEFAULT_NEW_TOKENS, Benchmark
from nemo_opd.errors import DataError, OPDError, RolloutError
from nemo_opd.evaluation.benchmark_tasks import LoadedBenchmark, as_lm_eval_runs
from nemo_opd.evaluation.estimates import Estimate, mean_with_interval, named, with_bounds
from nemo_opd.evaluation.likelihoods import Scored, Scorer
from nemo_opd.rollout.collect import turn_seed
from nemo_opd.rollout.engine_interface import Generator, Request, Sampling
from nemo_opd.rollout.episode import text_before

_log = logging.getLogger(__name__)
_Pair = tuple[Any, list[int], list[int]]
"""Any label, and the tokens of context and continuation."""
_RESAMPLES = 1000
"""Resamples for the standard error of a metric that is not a mean over questions."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """Properties of a model that lm-eval needs."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Maximum tokens of a sequence; longer ones are truncated from the left."""
    template_kwargs: Mapping[str, Any]
    """Arguments of the chat template."""
    seed: int = 0
    """Seed of sampling."""


class LanguageModel(TemplateLM):
    """The model as lm-eval calls it.

    Texts are tokenized as in lm-eval's `hf` backend: with the tokenizer's special tokens, unless the text contains them
    already. A text without context follows the bos token, or the eos token if the tokenizer lacks bos.
    """

    def __init__(self, model: TextModel, scorer: Scorer, generator: Generator) -> None:
        super().__init__()
        self.tokenizer, self._model = model.tokenizer, model
        self._scorer, self._generator = scorer, generator

    @property
    def max_length(self) -> int:
        return self._model.max_length

    @property
    def eot_token_id(self) -> int:
        if self.tokenizer.eos_token_id is None:
            raise DataError(
                f"the tokenizer {self.tokenizer.name_or_path} has no bos or eos token, which a benchmark needs before "
                "a text without context; use a tokenizer that has one"
            )
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token):
            add_special_tokens = False
        arguments = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **arguments))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return apply_template(
            self.tokenizer,
            chat_history,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
            **self._model.template_kwargs,
        )

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Return the tokens of both, at least one of each; lm-eval's `hf` backend fails without one.

        If one token spans the end of the context and the whole continuation, they are tokenized separately. If the
        context is white space only, lm-eval moves it to the continuation, and the context becomes the prefix token.
        """
        context_ids, continuation_ids = super()._encode_pair(context, continuation)
        if not continuation_ids:
            spaces = context[len(context.rstrip()) :]
            continuation_ids = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return context_ids or [self.prefix_token_id], continuation_ids

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return scores

    def _loglikelihood_tokens(self, requests: Sequence[_Pair], **_: Any) -> list[tuple[float, bool]]:
        limit = self.max_length + 1  # the last token is predicted but not read
        rows = [
            Scored(np.array((context + continuation)[-limit:], np.int32), min(len(continuation), limit - 1))
            for _, context, continuation in requests
        ]
        return self._scorer(rows)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [list(self._windows(*request.args)) for request in requests]
        scores = iter(self._loglikelihood_tokens([window for text_windows in windows for window in text_windows]))
        return [sum(next(scores)[0] for _ in text_windows) for text_windows in windows]

    def _windows(self, text: str) -> Iterator[_Pair]:
        ids = self.tok_encode(text)
        for window in get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1):
            yield (None, *make_disjoint_window(window))

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        answers: dict[int, str] = {}
        settings = [normalize_gen_kwargs(request.args[1], DEFAULT_NEW_TOKENS) for request in requests]
        self._warn_of_long_answers(max((request["max_gen_toks"] for request in settings), default=0))
        groups: dict[Sampling, list[int]] = {}
        for i, request_settings in enumerate(settings):
            groups.setdefault(_sampling(request_settings), []).append(i)
        for sampling, indices in groups.items():
            group = [self._request(i, requests[i].args[0], settings[i]) for i in indices]
            for i, completion in zip(indices, self._generator.generate(group, sampling), strict=True):
                text = str(self.tokenizer.decode(completion.ids, skip_special_tokens=True))
                answers[i] = text_before(text, _stops(settings[i]))
        return [answers[i] for i in range(len(requests))]

    def _warn_of_long_answers(self, max_new_tokens: int) -> None:
        if max_new_tokens >= self.max_length:
            _log.warning(
                "a benchmark asks for answers of up to %d tokens, but question and answer together are limited to %d "
                "(benchmark_length, and the model's positions); longer answers are truncated",
                max_new_tokens,
                self.max_length,
            )

    def _request(self, number: int, context: str, settings: Mapping[str, Any]) -> Request:
        """Build a request; truncate the question from the left for the answer, but not below half of `max_length`."""
        max_new_tokens = settings["max_gen_toks"]
        max_prompt_tokens = max(self.max_length - max_new_tokens, self.max_length // 2)
        ids = np.array(self.tok_encode(context)[-max_prompt_tokens:] or [self.prefix_token_id], np.int32)
        seed = turn_seed(self._model.seed, 0, number, 0, 0)
        return Request(ids, min(max_new_tokens, self.max_length - len(ids)), seed, stop=_stops(settings))


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Return a task's sampling settings from lm-eval's normalized ones."""
    temperature = float(settings.get("temperature", 1.0))
    if not settings["do_sample"] or not temperature:
        return Sampling(temperature=0.0, needs_raw=False)
    top_k = settings.get("top_k") or None
    return Sampling(temperature, float(settings.get("top_p", 1.0)), top_k, needs_raw=False)


def _stops(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(stop for stop in settings["until"] if stop)


@dataclass(frozen=True, slots=True)
class BenchmarkResult:
    """A model's metrics on one benchmark."""

    name: str
    estimates: Mapping[str, Estimate]
    """Value and interval of each metric; the interval has no width if lm-eval gives no standard error."""
    values: Mapping[str, Mapping[str, float]]
    """Value of each question, keyed by metric and question name, for metrics that are means over questions."""
    lower_is_better: tuple[str, ...]
    """Metrics for which lower is better."""
    num_questions: int

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics under their logged names: eval/<name>/acc, eval/<name>/acc_low, …"""
        return named(with_bounds(self.estimates), self.name)


def run_benchmark(
    loaded: LoadedBenchmark, model: LanguageModel, confidence: float, *, allows_code: bool
) -> BenchmarkResult:
    """Evaluate a model on a benchmark.

    Raises the model's errors, and RolloutError for an error in a task's own code.
    """
    benchmark = loaded.settings
    try:
        with as_lm_eval_runs():
            results = evaluate(
                lm=model,
                task_dict=loaded.tasks,
                limit=benchmark.limit,
                bootstrap_iters=_RESAMPLES,
                apply_chat_template=benchmark.chat,
                fewshot_as_multiturn=benchmark.chat,
                confirm_run_unsafe_code=allows_code,
            )
    except OPDError:
        raise
    except Exception as error:
        raise RolloutError(f"benchmark {benchmark.label}: lm-eval failed: {type(error).__name__}: {error}") from error
    return _result(benchmark, results, confidence)


def _result(benchmark: Benchmark, results: Mapping[str, Any], confidence: float) -> BenchmarkResult:
    """Return the metrics of the task or group, or of a group's tasks if the group has none."""
    samples, scores = results["samples"], results["results"]
    names = [benchmark.task] if _metrics(scores.get(benchmark.task, {})) else list(samples)
    estimates: dict[str, Estimate] = {}
    values: dict[str, Mapping[str, float]] = {}
    lower: list[str] = []
    for name in names:
        task_samples = {task: samples.get(task, ()) for task in _tasks_of(name, results)}
        is_higher_better = results.get("higher_is_better", {}).get(name, {})
        prefix = "" if name == benchmark.task else f"{name}."
        for metric, (key, value) in _metrics(scores[name]).items():
            by_question = _by_question(task_samples, *key.split(",", 1))
            if by_question and math.isclose(
                math.fsum(by_question.values()) / len(by_question), value, rel_tol=1e-9, abs_tol=1e-12
            ):
                values[prefix + metric] = by_question
                estimates[prefix + metric] = mean_with_interval(tuple(by_question.values()), confidence)
            else:
                error = scores[name].get(key.replace(",", "_stderr,", 1))
                estimates[prefix + metric] = _normal_interval(value, error, confidence)
            if is_higher_better.get(key.split(",")[0]) is False:
                lower.append(prefix + metric)
    num_questions = sum(len({sample["doc_id"] for sample in task_samples}) for task_samples in samples.values())
    return BenchmarkResult(benchmark.label, estimates, values, tuple(lower), num_questions)


def _metrics(scores: Mapping[str, Any]) -> dict[str, tuple[str, float]]:
    """Return (lm-eval's key, value) for each of our metric names; keys are `acc,none`, `exact_match,strict-match`."""
    return {
        key.removesuffix(",none").replace(",", "."): (key, float(value))
        for key, value in scores.items()
        if "," in key and "_stderr," not in key and isinstance(value, int | float)
    }


def _tasks_of(name: str, results: Mapping[str, Any]) -> Iterator[str]:
    """Yield a task's own name, or the tasks of a group and its subgroups."""
    members = results.get("group_subtasks", {}).get(name) or []
    if not members:
        yield name
    for member in members:
        yield from _tasks_of(member, results)


def _by_question(samples: Mapping[str, Sequence[Mapping[str, Any]]], metric: str, filter_name: str) -> dict[str, float]:
    """Return the metric of each question, or an empty dict if a question has no finite value.

    samples: samples of each task. A question's name consists of its task, its index and a hash of its row.
    """
    values = {
        f"{task}:{sample['doc_id']}:{sample['doc_hash'][:8]}": sample.get(metric)
        for task, task_samples in samples.items()
        for sample in task_samples
        if sample.get("filter", "none") == filter_name
    }
    numbers = {name: float(value) for name, value in values.items() if isinstance(value, int | float)}
    return numbers if len(numbers) == len(values) and all(map(math.isfinite, numbers.values())) else {}


def _normal_interval(value: float, error: object, confidence: float) -> Estimate:
    """Return the normal interval for a standard error, without a width if the error is missing."""
    has_error = isinstance(error, int | float) and math.isfinite(error)
    half = NormalDist().inv_cdf((1 + confidence) / 2) * float(error) if has_error else 0.0  # type: ignore[arg-type]
    return Estimate(value, value - half, value + half)
