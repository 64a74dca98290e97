"""Engines that sample with transformers' `generate`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation import StoppingCriteria, StoppingCriteriaList

from nemo_opd.alignment.token_roles import stop_ids
from nemo_opd.config.rollout import HFRollout
from nemo_opd.errors import ConfigError, RolloutError
from nemo_opd.models.generation import generating
from nemo_opd.models.load import load_model, load_tokenizer
from nemo_opd.models.token_trials import batching
from nemo_opd.progress import Work, working
from nemo_opd.rollout.engine_interface import (
    BatchLimit,
    Completion,
    Engine,
    EngineSpec,
    Generator,
    Request,
    Sampling,
    StudentModel,
    check_lengths,
)

_PADDING = 0
"""Any id works: positions before a prompt are masked, and positions after an end token are cut off."""
_MORE_TOKENS = 4
"""Tokens decoded before the longest stop text, since decoding may drop the first token's space."""


@contextmanager
def for_student(_: HFRollout, spec: EngineSpec, student: StudentModel, version: int) -> Iterator[Engine]:
    """Open the engine of a run."""
    yield _StudentWorkers(student, version)


class _StudentWorkers:
    """An engine that samples in the student's workers, with the current weights."""

    retried = 0

    def __init__(self, student: StudentModel, version: int) -> None:
        self._student = student
        self.version = version

    def follow(self, version: int) -> None:
        self.version = version

    def rest(self) -> None:
        """Do nothing: the memory of sampling is already free."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        return self._student.generate(requests, sampling, self.version)


@contextmanager
def for_model(settings: HFRollout, spec: EngineSpec, model: str, device: str) -> Iterator[Generator]:
    """Open the engine of an evaluated model. Raises ModelError, and ConfigError if the GPU is missing."""
    device = chosen_device(device)
    is_bfloat16 = spec.dtype == "bfloat16" or (spec.dtype == "auto" and device == "cuda")
    loaded = load_model(model, torch.bfloat16 if is_bfloat16 else torch.float32, key="model").eval().to(device)
    with generating(loaded, None):
        yield Sampler(
            loaded,
            end_ids=spec.end_ids,
            vocab_size=spec.vocab_size,
            limit=BatchLimit(settings.batch_size),
            device=device,
            tokenizer=cache(partial(load_tokenizer, model, key="model")),
        )


def chosen_device(device: str) -> str:
    """Resolve `auto` to a device. Raises ConfigError for cuda without a GPU."""
    has_gpu = torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise ConfigError("device=cuda: PyTorch sees no GPU on this machine; write device=cpu")
    return ("cuda" if has_gpu else "cpu") if device == "auto" else device


class Sampler(Generator):
    """A generator that calls the `generate` of a causal language model, in batches with a KV cache.

    A request's tokens depend only on its seed and the model's logits. Batching changes the last bits of the logits, so
    another batch gives the same tokens unless a drawn number is within rounding error of a token's boundary.

    transformers' continuous batching does not fit: it draws all requests' tokens from one random generator, and returns
    log-probabilities of the warped distribution only.

    Prompts are padded on the left. A model whose output changes with padding samples only prompts of equal length
    together, or one prompt at a time (`batching`).
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        end_ids: Collection[int],
        vocab_size: int,
        limit: BatchLimit,
        device: str,
        tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None,
    ) -> None:
        """end_ids: tokens that end a sequence. vocab_size: head columns that are tokens. tokenizer: called for
        requests with stop texts.
        """
        self._tokenizer = tokenizer
        self._model: Any = model
        self._end_ids = np.array(sorted(end_ids), np.int32)
        self._vocab_size, self._limit, self._device = vocab_size, limit, device

    @torch.no_grad()
    def generate(self, requests: Sequence[Request], sampling: Sampling, version: int = 0) -> list[Completion]:
        """Return one completion per request, in order, marked as sampled by weights of `version`.

        Communicates as the model's forward does. Raises RolloutError for requests that do not fit the model, and for
        non-finite logits.
        """
        check_lengths(requests, max_positions(self._model.config))
        completions: dict[int, Completion] = {}
        with working("sampling", len(requests), "sequences") as work:
            for rows in self._batches(requests):
                work.done = len(completions)
                batch = self._generate_batch([requests[i] for i in rows], sampling, version, work)
                completions |= zip(rows, batch, strict=True)
        return [completions[i] for i in range(len(requests))]

    def _batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Yield batches of request indices: similar in cost, within the limits and compatible with the model."""
        lengths = [len(request.prompt_ids) for request in requests]
        # By token limit, which sets the number of steps, then by prompt length, which sets the padding.
        order = sorted(range(len(requests)), key=lambda i: (requests[i].max_new_tokens, lengths[i]))
        mode = batching(self._model.config) if len(requests) > 1 and self._limit.sequences > 1 else "any"
        if mode == "equal_lengths":
            order.sort(key=lambda i: lengths[i])
        max_rows = 1 if mode == "alone" else self._limit.sequences
        rows, prompt_length = list[int](), 0
        for i in order:
            longest = max(prompt_length, lengths[i])
            tokens = (len(rows) + 1) * (longest + requests[i].max_new_tokens)
            is_full = len(rows) == max_rows or tokens > (self._limit.tokens or tokens)
            if rows and (is_full or (mode == "equal_lengths" and lengths[i] != prompt_length)):
                yield rows
                rows, longest = [], lengths[i]
            rows, prompt_length = [*rows, i], longest
        if rows:
            yield rows

    def _generate_batch(
        self, requests: Sequence[Request], sampling: Sampling, version: int, work: Work
    ) -> list[Completion]:
        prompts = [torch.from_numpy(np.asarray(request.prompt_ids, np.int64)) for request in requests]
        ids = _left_padded(prompts, _PADDING)
        mask = _left_padded([torch.ones_like(prompt) for prompt in prompts], 0)
        limits = torch.tensor([request.max_new_tokens for request in requests])
        steps = int(limits.max())
        numbers = torch.from_numpy(uniforms([request.seed for request in requests], steps)).to(self._device)
        processor = InverseCDF(sampling, numbers, self._vocab_size)
        criteria: list[StoppingCriteria] = [_Limits(limits.to(self._device), ids.shape[1], work)]
        stopped: dict[int, int] = {}
        if any(request.stop for request in requests):
            assert self._tokenizer is not None, "stop texts are read by a tokenizer"
            stops = _StopTexts(requests, self._tokenizer(), ids.shape[1], self._end_ids.tolist())
            criteria, stopped = [*criteria, stops], stops.lengths
        settings = GenerationConfig(
            max_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            eos_token_id=self._end_ids.tolist() or None,
            pad_token_id=_PADDING,
        )
        with _only_generation_config(self._model, settings):
            sequences = self._model.generate(
                ids.to(self._device),
                attention_mask=mask.to(self._device),
                generation_config=settings,
                logits_processor=LogitsProcessorList([processor]),
                stopping_criteria=StoppingCriteriaList(criteria),
                synced_gpus=False,
            )
        sampled = sequences[:, ids.shape[1] :].int()
        columns = [column.cpu().numpy() for column in (sampled, processor.logprobs, processor.behaviour_logprobs)]
        rows = zip(requests, *columns, strict=True)
        return [self._completion(*row, version=version, stopped=stopped.get(i)) for i, row in enumerate(rows)]

    def _completion(
        self,
        request: Request,
        ids: NDArray[np.int32],
        logprobs: NDArray[np.float32],
        behaviour_logprobs: NDArray[np.float32],
        *,
        version: int,
        stopped: int | None,
    ) -> Completion:
        """Cut a row of the batch, as long as the longest sequence, at the first end token.

        stopped: length at which a stop text ended the row.
        """
        limit = stopped or min(request.max_new_tokens, len(ids))
        ends = np.flatnonzero(np.isin(ids[:limit], self._end_ids))
        length = int(ends[0]) + 1 if len(ends) else limit
        if not np.isfinite([logprobs[:length], behaviour_logprobs[:length]]).all():
            raise RolloutError(
                f"the model's logits are not finite after {len(request.prompt_ids)} tokens of a prompt; its weights "
                "have diverged or do not fit its dtype: lower student.optimizer.lr, or use bfloat16 or float32"
            )
        return Completion(
            ids[:length].copy(),
            logprobs[:length].copy(),
            behaviour_logprobs[:length].copy(),
            "stop" if len(ends) or stopped else "length",
            version,
        )


class _Limits(StoppingCriteria):
    """Limits of new tokens per sequence."""

    def __init__(self, limits: Tensor, prompt_length: int, work: Work) -> None:
        """limits: [B]. prompt_length: with padding. work: advances by B in total, evenly over the longest limit."""
        self._limits, self._prompt_length = limits, prompt_length
        self._work, self._per_token = work, len(limits) / int(limits.max())

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return which sequences have ended: [B, S] → bool [B]."""
        self._work.advance(self._per_token)
        is_over: Tensor = self._limits <= input_ids.shape[1] - self._prompt_length
        return is_over


class _StopTexts(StoppingCriteria):
    """A stopping criterion with stop texts per sequence.

    A stop text of B bytes has at most B tokens, so each step decodes only the last tokens of a sequence, without
    special tokens.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        tokenizer: PreTrainedTokenizerBase,
        prompt_length: int,
        end_ids: Collection[int],
    ) -> None:
        """prompt_length: with padding. end_ids: tokens that end a sequence; stop texts after them do not count."""
        self._stops = {row: request.stop for row, request in enumerate(requests) if request.stop}
        self._window = _MORE_TOKENS + max(len(stop.encode()) for stops in self._stops.values() for stop in stops)
        self._tokenizer, self._prompt_length, self._end_ids = tokenizer, prompt_length, frozenset(end_ids)
        self.lengths: dict[int, int] = {}
        """Row → number of new tokens, for rows that a stop text has ended."""

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        """Return which sequences have ended: [B, S] → bool [B]."""
        number = input_ids.shape[1] - self._prompt_length
        rows = input_ids[:, -min(number, self._window) :].tolist() if self._stops else []
        for row, stops in list(self._stops.items()):
            text = self._tokenizer.decode(rows[row], skip_special_tokens=True)
            if any(stop in text for stop in stops):
                self.lengths[row] = number
            elif rows[row][-1] not in self._end_ids:
                continue
            del self._stops[row]
        is_over = torch.zeros(len(input_ids), dtype=torch.bool)
        is_over[list(self.lengths)] = True
        return is_over.to(input_ids.device)


@contextmanager
def _only_generation_config(model: Any, settings: GenerationConfig) -> Iterator[None]:
    """Replace the model's generation config, since transformers fills options that `settings` leaves unset from it."""
    original = model.generation_config
    model.generation_config = settings
    try:
        yield
    finally:
        model.generation_config = original


def _left_padded(rows: list[Tensor], value: int) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=value, padding_side="left")


class InverseCDF(LogitsProcessor):
    """A logits processor that samples each step's tokens and gives them the only finite scores.

    It records the sampled tokens' log-probabilities under the raw and under the warped distribution.
    """

    def __init__(self, sampling: Sampling, uniform: Tensor, vocab_size: int) -> None:
        """uniform: float64 [B, steps]. vocab_size: columns that are tokens."""
        self._warpers: Any = _warpers_of(sampling)
        self._is_greedy = sampling.temperature == 0
        self._uniform, self._vocab_size = uniform, vocab_size
        self._logprobs: list[Tensor] = []
        self._behaviour_logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Sample tokens: [B, S], [B, V] fp32 → [B, V]."""
        raw = scores[:, : self._vocab_size].float()
        if self._is_greedy:
            warped = torch.full_like(raw, -torch.inf).scatter_(-1, raw.argmax(-1, keepdim=True), 0.0)
        else:
            warped = self._warpers(input_ids, raw)
        tokens = inverse_cdf(warped.softmax(-1), self._uniform[:, len(self._logprobs)]).unsqueeze(-1)
        self._logprobs.append(_log_probability(raw, tokens))
        self._behaviour_logprobs.append(_log_probability(warped, tokens))
        return torch.full_like(scores, -torch.inf).scatter_(-1, tokens, 0.0)

    @property
    def logprobs(self) -> Tensor:
        """Log-probabilities under the raw distribution, fp32 [B, steps so far]."""
        return torch.stack(self._logprobs, -1)

    @property
    def behaviour_logprobs(self) -> Tensor:
        """Log-probabilities under the warped distribution, fp32 [B, steps so far]."""
        return torch.stack(self._behaviour_logprobs, -1)


def _warpers_of(sampling: Sampling) -> LogitsProcessorList:
    """Return the active warpers, in the order temperature, top-k, top-p."""
    warpers = LogitsProcessorList()
    if sampling.temperature not in (0, 1):
        warpers.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        warpers.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        warpers.append(TopPLogitsWarper(sampling.top_p))
    return warpers


def _log_probability(scores: Tensor, tokens: Tensor) -> Tensor:
    """Return log-probabilities [B] of tokens [B, 1] under the softmax of scores [B, V]."""
    return (scores.gather(-1, tokens) - scores.logsumexp(-1, keepdim=True)).squeeze(-1)


def inverse_cdf(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """Sample tokens by inverse CDF: [B, V], [B] in [0, 1) → [B] int64.

    Tokens are ordered by id, so rounding only moves the boundaries between them. A token of probability 0 is never
    sampled, however sums are rounded.
    """
    # A 32-bit sum over a large vocabulary would lose rare tokens.
    cumulative = probabilities.double().cumsum(-1).masked_fill(probabilities == 0, 0)
    total = cumulative.amax(-1, keepdim=True)
    target = torch.minimum(uniform.unsqueeze(-1) * total, torch.nextafter(total, torch.zeros_like(total)))
    # argmax returns the first maximum.
    return (cumulative > target).int().argmax(-1)


def uniforms(seeds: Sequence[int], steps: int) -> NDArray[np.float64]:
    """Draw one number in [0, 1) per token, [B, steps], from the sequences' seeds; fewer steps give a prefix."""
    return np.stack([np.random.Generator(np.random.Philox(seed)).random(steps) for seed in seeds])


def max_positions(config: PretrainedConfig) -> int | None:
    """Return the longest sequence in tokens; None if the configuration has no limit."""
    limit = getattr(config.get_text_config(), "max_position_embeddings", None)
    return int(limit) if limit else None


def end_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig | None = None) -> frozenset[int]:
    """Return the tokens that end a sampled sequence.

    They are the EOS ids of the model's and the tokenizer's generation configs, the tokenizer's EOS, and the chat
    template's turn-end tokens.
    """
    configured: Any = None if generation_config is None else generation_config.eos_token_id
    return (
        stop_ids(tokenizer) | {configured}
        if isinstance(configured, int)
        else stop_ids(tokenizer).union(configured or ())
    )
