"""Adapter of a run's model for lm-eval, with likelihoods from its workers and texts from its engine."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from nemo_opd.config.evaluation import DEFAULT_NEW_TOKENS
from nemo_opd.errors import DataError
from nemo_opd.evaluation.likelihoods import Scored, Scorer
from nemo_opd.rollout.base import Generator, Request, Sampling
from nemo_opd.rollout.collect import turn_seed
from nemo_opd.rollout.stops import text_before

_log = logging.getLogger(__name__)
_Pair = tuple[Any, list[int], list[int]]
"""Any label, and the tokens of context and continuation."""


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
        return self._special(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    def _special(self, token: int | None) -> int:
        if token is None:
            raise DataError(
                f"the tokenizer {self.tokenizer.name_or_path} has no bos or eos token, which a benchmark needs before "
                "a text without context; use a tokenizer that has one"
            )
        return int(token)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token):
            add_special_tokens = False
        arguments = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **arguments))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._model.template_kwargs,
            )
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
