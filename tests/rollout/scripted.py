"""An engine with scripted answers, and prompts for it."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from nemo_opd.data.row_types import FinishReason, Prompt
from nemo_opd.rollout.engine_interface import Completion, Request, Sampling


class Scripted:
    """An engine whose log-probabilities count down from −1, and behaviour log-probabilities from −0.5.

    answer: function from a request to the turn's ids and finish reason. `calls` records the requests.
    """

    version = 7

    def __init__(self, answer: Callable[[Request], tuple[Sequence[int], FinishReason]]) -> None:
        self.answer, self.calls = answer, list[list[Request]]()

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        self.calls.append(list(requests))
        return [self.completion(*self.answer(request)) for request in requests]

    def completion(self, ids: Sequence[int], finish_reason: FinishReason) -> Completion:
        logprobs = -1 - np.arange(len(ids), dtype=np.float32)
        return Completion(np.array(ids, np.int32), logprobs, logprobs + 0.5, finish_reason, self.version)


def speaking(tokenizer: Any, end: int, *turns: str) -> Scripted:
    """Return an engine whose calls sample the turns one after another, in canonical tokens with an end token."""
    remaining = iter(turns)
    return Scripted(lambda request: ([*encoded(tokenizer, next(remaining)), end], "stop"))


def encoded(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def asking(text: str, index: int = 3, **fields: Any) -> Prompt:
    return Prompt(index, [{"role": "user", "content": text}], **fields)
