"""A model of a run as lm-eval calls it: likelihoods from its workers, texts from its engine."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from transformers import PreTrainedTokenizerBase

from nemo_opd.config.evaluation import DEFAULT_NEW_TOKENS
from nemo_opd.errors import DataError
from nemo_opd.evaluation.likelihoods import Scored, Scorer
from nemo_opd.rollout.base import Generator, Request, Sampling
from nemo_opd.rollout.collect import turn_seed

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names by which tasks limit an answer."""
_Pair = tuple[Any, list[int], list[int]]
"""Texts, or what stands for them, and the tokens of context and continuation."""


@dataclass(frozen=True, slots=True)
class TextModel:
    """Facts about a model that lm-eval needs besides its answers."""

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
        groups: dict[Sampling, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(_sampling(request.args[1]), []).append(i)
        for sampling, own in groups.items():
            made = self._generator.generate([self._request(i, *requests[i].args) for i in own], sampling)
            for i, completion in zip(own, made, strict=True):
                text = str(self.tokenizer.decode(completion.ids, skip_special_tokens=True))
                answers[i] = _cut(text, requests[i].args[1].get("until"))
        return [answers[i] for i in range(len(requests))]

    def _request(self, number: int, context: str, kwargs: Mapping[str, Any]) -> Request:
        new = min(next((int(kwargs[name]) for name in _LENGTHS if name in kwargs), DEFAULT_NEW_TOKENS), self.max_length)
        room = max(1, self.max_length - new)
        ids = np.array(self.tok_encode(context)[-room:] or [self.prefix_token_id], np.int32)
        return Request(ids, min(new, self.max_length - len(ids)), turn_seed(self._model.seed, 0, number, 0, 0))


def _sampling(kwargs: Mapping[str, Any]) -> Sampling:
    """Return how a task samples: the likeliest token, unless it says do_sample."""
    if not kwargs.get("do_sample", False) or not kwargs.get("temperature", 1.0):
        return Sampling(temperature=0.0, needs_raw=False)
    top_k = kwargs.get("top_k") or None
    return Sampling(float(kwargs.get("temperature", 1.0)), float(kwargs.get("top_p", 1.0)), top_k, needs_raw=False)


def _cut(text: str, until: str | Sequence[str] | None) -> str:
    """Return the text before the first of these."""
    for stop in [until] if isinstance(until, str) else until or ():
        if stop:
            text = text.split(stop)[0]
    return text
