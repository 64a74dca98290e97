"""A model of a run as lm-eval calls it: likelihoods from its workers, texts from its engine."""

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
"""Texts, or what stands for them, and the tokens of context and continuation."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """Facts about a model that lm-eval needs in addition to its answers."""

    tokenizer: PreTrainedTokenizerBase
    max_length: int
    """Tokens of a sequence; longer ones are cut from the left."""
    template_kwargs: Mapping[str, Any]
    """Arguments of the chat template."""
    seed: int = 0
    """Seed of sampling."""


class LanguageModel(TemplateLM):
    """Texts are tokenized as lm-eval's `hf` backend does: with the tokenizer's special tokens, unless they are written;
    a text without context follows the token that begins texts, or else the one that ends them.
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
                f"the tokenizer {self.tokenizer.name_or_path} has no token that begins or ends a text, after which a "
                "benchmark reads a text without context; use a tokenizer that has one"
            )
        return int(token)

    @property
    def tokenizer_name(self) -> str:
        return self.tokenizer.name_or_path.replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        if add_special_tokens is None and self.tokenizer.bos_token and string.startswith(self.tokenizer.bos_token):
            add_special_tokens = False
        more = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, **more))

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
        """Return the tokens of both, and one token of each at least: `hf` fails where there is none.

        That is where a token is the end of the context and all of the continuation, which are then tokenized apart, and
        where the context is white space, which lm-eval leaves to the continuation.
        """
        before, scored = super()._encode_pair(context, continuation)
        if not scored:
            spaces = context[len(context.rstrip()) :]
            scored = self.tok_encode(spaces + continuation, add_special_tokens=False)
        return before or [self.prefix_token_id], scored

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[_Pair], **_: Any) -> list[tuple[float, bool]]:
        limit = self.max_length + 1  # the last token is predicted and not read
        rows = [
            Scored(np.array((context + continuation)[-limit:], np.int32), min(len(continuation), limit - 1))
            for _, context, continuation in requests
        ]
        return self._scorer(rows)

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        windows = [list(self._windows(*request.args)) for request in requests]
        found = iter(self._loglikelihood_tokens([window for own in windows for window in own]))
        return [sum(next(found)[0] for _ in own) for own in windows]

    def _windows(self, text: str) -> Iterator[_Pair]:
        ids = self.tok_encode(text)
        made = get_rolling_token_windows(ids, self.prefix_token_id, max_seq_len=self.max_length, context_len=1)
        for window in made:
            yield (None, *make_disjoint_window(window))

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        answers: dict[int, str] = {}
        settings = [normalize_gen_kwargs(request.args[1], DEFAULT_NEW_TOKENS) for request in requests]
        self._warn_of_long_answers(max((each["max_gen_toks"] for each in settings), default=0))
        groups: dict[Sampling, list[int]] = {}
        for i, each in enumerate(settings):
            groups.setdefault(_sampling(each), []).append(i)
        for sampling, own in groups.items():
            asked = [self._request(i, requests[i].args[0], settings[i]) for i in own]
            for i, completion in zip(own, self._generator.generate(asked, sampling), strict=True):
                text = str(self.tokenizer.decode(completion.ids, skip_special_tokens=True))
                answers[i] = text_before(text, _stops(settings[i]))
        return [answers[i] for i in range(len(requests))]

    def _warn_of_long_answers(self, new: int) -> None:
        if new >= self.max_length:
            _log.warning(
                "a benchmark asks for answers of up to %d tokens, and question and answer have %d together "
                "(benchmark_length, and what the model reads); answers are cut there",
                new,
                self.max_length,
            )

    def _request(self, number: int, context: str, settings: Mapping[str, Any]) -> Request:
        """Cut the question from the left where the answer needs the room, but to no less than half of the whole."""
        new = settings["max_gen_toks"]
        room = max(self.max_length - new, self.max_length // 2)
        ids = np.array(self.tok_encode(context)[-room:] or [self.prefix_token_id], np.int32)
        seed = turn_seed(self._model.seed, 0, number, 0, 0)
        return Request(ids, min(new, self.max_length - len(ids)), seed, stop=_stops(settings))


def _sampling(settings: Mapping[str, Any]) -> Sampling:
    """Return how a task samples, from settings that lm-eval has normalized."""
    temperature = float(settings.get("temperature", 1.0))
    if not settings["do_sample"] or not temperature:
        return Sampling(temperature=0.0, needs_raw=False)
    top_k = settings.get("top_k") or None
    return Sampling(temperature, float(settings.get("top_p", 1.0)), top_k, needs_raw=False)


def _stops(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(stop for stop in settings["until"] if stop)
