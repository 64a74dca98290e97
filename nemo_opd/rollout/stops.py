"""Stop texts, which end a sequence when they are sampled."""

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase
from transformers.generation import StoppingCriteria

from nemo_opd.rollout.base import Request

_MORE_TOKENS = 4
"""Tokens decoded before the longest stop text, since decoding may drop the first token's space."""


def text_before(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first stop text."""
    for stop in stops:
        text = text.partition(stop)[0]
    return text


class StopTexts(StoppingCriteria):
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
