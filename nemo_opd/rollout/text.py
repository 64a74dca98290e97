"""Texts that the student continues."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from nemo_opd.alignment import Pieces, pieces_of
from nemo_opd.alignment.chat_tokens import locate_tokens
from nemo_opd.data.continuation import Continued, Ids, TextContinuation, text_of
from nemo_opd.data.record import Message, Prompt
from nemo_opd.data.samples import require_ids
from nemo_opd.errors import DataError, RolloutError
from nemo_opd.rollout.prompts import Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TextRenderer:
    """Prompts that are texts: the tokenizer's default special tokens in front, and no end of sequence behind."""

    takes_turns = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> None:
        """`vocab_size`: ids the model can read, all by default. Raises AlignmentError where tokens lack exact bytes."""
        self._tokenizer = tokenizer
        self._pieces = pieces_of(tokenizer)
        self._vocab_size = vocab_size or self._pieces.vocab_size
        self._continue = TextContinuation(tokenizer)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """[P]. Raises DataError where there is no token to start from, or one that the model cannot read."""
        text = text_of(prompt)
        ids = self._continue(text, "", is_ended=False).ids
        if not len(ids):
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0) has no tokens; leave the row out, or use a tokenizer "
                "that starts texts with a special token"
            )
        require_ids(ids, self._vocab_size, self._tokenizer, text)
        return ids

    def continued(self, prompt: Prompt) -> Continued:
        """Prompt and response tokenized as one text, with the end of sequence. Raises DataError as `prompt_ids` does,
        and where there is no response.
        """
        text, response = text_of(prompt), response_of(prompt)
        continued = self._continue(text, response, is_ended=True)
        require_ids(continued.ids, self._vocab_size, self._tokenizer, text + response)
        return continued

    def text(self, ids: Ids) -> str:
        return spelled(self._pieces, ids)

    def tool_calls(self, ids: Ids, start: int, tools: Tools) -> list[Message]:
        return []

    def between(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> Ids:
        raise RolloutError("a text has no turns that somebody could answer; set data.messages_key for conversations")

    def shows_tools(self, tools: Tools) -> bool:
        return not tools

    def num_tokens(self, text: str) -> int:
        return num_tokens(self._tokenizer, text)

    def shortened(self, text: str, max_tokens: int) -> str:
        return shortened(self._tokenizer, text, max_tokens)


def response_of(prompt: Prompt) -> str:
    """Raises DataError where the dataset has none."""
    if prompt.response is None:
        raise DataError(
            f"prompt {prompt.index} (row, counted from 0) has no response to learn from, which "
            "rollout.on_policy_share below 1 needs; name the column in data.response_key (texts), end the conversation "
            "with the assistant's message, or set rollout.on_policy_share=1"
        )
    return prompt.response


def spelled(pieces: Pieces, ids: Ids) -> str:
    return b"".join(map(pieces.bytes_of, ids.tolist())).decode("utf-8", "replace")


def num_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    return len(tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"])


def shortened(tokenizer: PreTrainedTokenizerBase, text: str, max_tokens: int) -> str:
    tokens = locate_tokens(tokenizer, text)
    return text if len(tokens.ids) <= max_tokens else text[: int(tokens.starts[max_tokens])]
