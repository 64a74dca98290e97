"""Tokenization of a text and its continuation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.chat_tokens import locate_tokens
from nemo_opd.data.record import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt and its continuation as tokens."""

    ids: Ids
    """[S]"""
    start: int
    """Position of the continuation's first token."""
    is_ended: bool
    """Whether the last token ends the turn."""
    before: str = ""
    """Beginning of the continuation that shares the prompt's last token, before `start`."""


class TextContinuation:
    """A tokenizer of a prompt and its continuation as one text. Picklable."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._lead = _leading_special_tokens(tokenizer)

    def __call__(self, prompt: str, response: str, *, is_ended: bool) -> Continued:
        """Return all tokens and, if `is_ended`, the tokenizer's end-of-sequence token, if it has one.

        Special tokens that the text itself spells at its beginning or end are not added a second time.

        The continuation starts with the first token that holds no character of the prompt.
        """
        text = prompt + response
        tokens = locate_tokens(self._tokenizer, text)
        start = int(np.searchsorted(tokens.starts, len(prompt), "left"))
        stop = int(tokens.starts[start]) if start < len(tokens.starts) else len(text)
        eos = self._tokenizer.eos_token_id if is_ended else None
        spells_end = len(tokens.ids) > 0 and tokens.ids[-1] == eos
        end = np.array([] if eos is None or spells_end else [eos], np.int32)
        spells_lead = np.array_equal(tokens.ids[: len(self._lead)], self._lead)
        lead = self._lead[:0] if spells_lead else self._lead
        ids = np.concatenate([lead, tokens.ids, end])
        return Continued(ids, len(lead) + start, eos is not None, text[len(prompt) : stop])


def _leading_special_tokens(tokenizer: PreTrainedTokenizerBase) -> Ids:
    """Return the tokens that the tokenizer puts before a text by default."""
    bare = tokenizer("a", add_special_tokens=False)["input_ids"]
    tokens = tokenizer("a")["input_ids"]
    count = next(i for i in range(len(tokens) + 1) if tokens[i : i + len(bare)] == bare)
    return np.array(tokens[:count], np.int32)


def text_of(prompt: Prompt) -> str:
    assert isinstance(prompt.content, str), "a text renderer is for prompts that are texts"
    return prompt.content
