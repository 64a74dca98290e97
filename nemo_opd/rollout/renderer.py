"""Renderers: from prompts to token ids, and from sampled ids to text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from nemo_opd.alignment import pieces_of
from nemo_opd.alignment.chat import locate_tokens
from nemo_opd.data.row_types import Message, Prompt
from nemo_opd.data.samples import require_ids
from nemo_opd.data.text import Continued, Ids, TextContinuation, text_of
from nemo_opd.errors import DataError, RolloutError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tools = Sequence[dict[str, Any]] | None


class Renderer(ABC):
    """The base class of renderers."""

    takes_turns: ClassVar[bool]
    """Whether prompts are conversations, so that an environment can answer."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> None:
        """vocab_size: number of ids the model can read, all by default. Raises AlignmentError for inexact tokens."""
        self._tokenizer = tokenizer
        self._pieces = pieces_of(tokenizer)
        self._vocab_size = vocab_size or self._pieces.vocab_size

    @abstractmethod
    def prompt_ids(self, prompt: Prompt) -> Ids:
        """Return the tokens [P] before the model's turn. Raises DataError, naming the prompt's row."""

    @abstractmethod
    def continued(self, prompt: Prompt) -> Continued:
        """Return the prompt with its `response`. Raises DataError, naming the prompt's row."""

    def text(self, ids: Ids) -> str:
        """Decode sampled tokens exactly, without special tokens; invalid UTF-8 becomes U+FFFD."""
        return b"".join(map(self._pieces.bytes_of, ids.tolist())).decode("utf-8", "replace")

    def tool_calls(self, ids: Ids, start: int, tools: Tools) -> list[Message]:
        """Return the calls in the turn [start, S) of ids [S], in the form of nemo_opd.rollout.conversation."""
        return []

    def between(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> Ids:
        """Return the tokens between two turns of the model: the last of `messages`, and the turn after the `new` ones.

        Raises RolloutError if the chat template rejects the messages.
        """
        raise RolloutError("plain texts have no turns to answer; set data.messages_key to train on conversations")

    def shows_tools(self, tools: Tools) -> bool:
        """Return whether the chat template shows tools to the model."""
        return not tools

    def num_tokens(self, text: str) -> int:
        """Count the tokens of a text by itself."""
        return num_tokens(self._tokenizer, text)

    def shortened(self, text: str, max_tokens: int) -> str:
        """Cut a text to its first `max_tokens` tokens."""
        tokens = locate_tokens(self._tokenizer, text)
        return text if len(tokens.ids) <= max_tokens else text[: int(tokens.starts[max_tokens])]

    def _require_embeddings(self, ids: Ids, content: str) -> None:
        require_ids(ids, self._vocab_size, self._tokenizer, content)


class TextRenderer(Renderer):
    """A renderer of plain texts: prompts start with the tokenizer's default special tokens and have no end token."""

    takes_turns = False

    def __init__(self, tokenizer: PreTrainedTokenizerBase, vocab_size: int | None = None) -> None:
        super().__init__(tokenizer, vocab_size)
        self._continue = TextContinuation(tokenizer)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """Return the tokens [P]. Raises DataError for a prompt without tokens or a token without embedding."""
        text = text_of(prompt)
        ids = self._continue(text, "", is_ended=False).ids
        if not len(ids):
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0) has no tokens; leave the row out, or use a tokenizer "
                "that starts texts with a special token"
            )
        self._require_embeddings(ids, text)
        return ids

    def continued(self, prompt: Prompt) -> Continued:
        """Tokenize prompt and response as one text, with an end token.

        Raises DataError as `prompt_ids` does, and for a prompt without response.
        """
        text, response = text_of(prompt), response_of(prompt)
        continued = self._continue(text, response, is_ended=True)
        self._require_embeddings(continued.ids, text + response)
        return continued


def encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Tokenize a text without special tokens around it."""
    return tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def num_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Count the tokens of a text by itself."""
    return len(encode(tokenizer, text))


def response_of(prompt: Prompt) -> str:
    """Return the dataset's response. Raises DataError if it is missing."""
    if prompt.response is None:
        raise DataError(
            f"prompt {prompt.index} (row, counted from 0) has no response to learn from, which "
            "rollout.on_policy_share below 1 needs; name the column in data.response_key (texts), end the conversation "
            "with the assistant's message, or set rollout.on_policy_share=1"
        )
    return prompt.response
