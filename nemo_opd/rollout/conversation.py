"""The renderer of conversations, by a model's chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_opd.alignment import ChatRenderer
from nemo_opd.alignment.chat_tokens import LocatedTokens, locate_tokens
from nemo_opd.alignment.chat_turns import common_prefix
from nemo_opd.alignment.token_roles import turn_end_ids
from nemo_opd.data.continuation import Continued, Ids
from nemo_opd.data.record import Message, Prompt
from nemo_opd.errors import AlignmentError, DataError, RolloutError
from nemo_opd.rollout.renderer import Renderer, TextRenderer, Tools, encode, response_of
from nemo_opd.rollout.tool_calls import ToolCallParser, valid_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class ConversationRenderer(Renderer):
    """Prompts that are conversations.

    Sampled tokens are never tokenized again: the template's tokens after a turn are taken from a rendering in which a
    placeholder replaces the turn, after the token that ends it.
    """

    takes_turns = True

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        template_kwargs: Mapping[str, Any] | None = None,
        vocab_size: int | None = None,
        *,
        key: str = "student",
    ) -> None:
        """template_kwargs: variables of the template, such as `enable_thinking`. vocab_size: number of ids the model
        can read; by default all. key: the model's section in the settings.

        Raises AlignmentError for a tokenizer without a chat template or with inexact tokens.
        """
        self._whole = ChatRenderer(tokenizer, template_kwargs=template_kwargs)
        super().__init__(tokenizer, vocab_size)
        self._key = key
        self._turn_ends = turn_end_ids(tokenizer)
        self._calls = ToolCallParser(tokenizer, template_kwargs)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """Return the tokens [P], the generation prompt included.

        Raises DataError where the template refuses the conversation, or for a token that the model cannot read.
        """
        try:
            text = self._render(_messages_of(prompt), prompt.tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program: it may fail with any exception
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0): the chat template of {self._key} refuses it: {error}; "
                f"change or leave out the row, or set {self._key}.chat_template to one that accepts it"
            ) from error
        ids = np.array(encode(self._tokenizer, text), np.int32)
        self._require_known(ids, text)
        return ids

    def continued(self, prompt: Prompt) -> Continued:
        """Return the conversation and its response, through the token that ends the turn.

        Raises DataError as `prompt_ids` does, and where there is no response.
        """
        answered = [*_messages_of(prompt), {"role": "assistant", "content": response_of(prompt)}]
        try:
            whole = self._whole(answered, prompt.tools)
        except AlignmentError as error:
            raise DataError(f"prompt {prompt.index} (row, counted from 0): {error}") from error
        self._require_known(whole.ids, str(answered))
        stop = int(np.flatnonzero(whole.assistant_mask).max(initial=-1)) + 1
        if not stop:
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0): the chat template of {self._key} leaves out the "
                f"assistant's messages; set {self._key}.chat_template to one that writes it"
            )
        start = int(np.flatnonzero(~whole.assistant_mask[:stop]).max(initial=-1)) + 1
        return Continued(whole.ids[:stop], start, int(whole.ids[stop - 1]) in self._turn_ends)

    def tool_calls(self, ids: Ids, start: int, tools: Tools) -> list[Message]:
        return self._calls(ids, start, tools)

    def between(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> Ids:
        """Return the tokens after the one that ends the model's turn in the template; after the turn if none does.

        Raises RolloutError where the template refuses the messages, DataError for a token that the model cannot read.
        """
        mark = _unused_character([*messages, *new])
        alone, text = self._marked(messages, new, tools, mark)
        shared = common_prefix(alone, text.rpartition(mark)[2])
        ids = self._after_turn(locate_tokens(self._tokenizer, text), text.rindex(mark) + len(mark), shared)
        self._require_known(ids, str(list(new)))
        return ids

    def shows_tools(self, tools: Tools) -> bool:
        question: list[Message] = [{"role": "user", "content": "?"}]
        return not tools or self._render(question, tools) != self._render(question, None)

    def _marked(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools, mark: str) -> tuple[str, str]:
        """Return the template's text after a placeholder that ends the conversation, and the whole text that goes on.

        Some templates require a call before a tool's answer.
        """
        refusal: Exception = ValueError("it leaves out the student's messages")
        for marked in (_as_texts(messages, mark), _as_calls(messages, mark)):
            try:
                alone = self._render(marked, tools)
                whole = self._render([*marked, *new], tools, add_generation_prompt=True)
            except Exception as error:  # a template is a program: it may fail with any exception
                refusal = error
                continue
            if mark in alone and mark in whole:
                return alone.rpartition(mark)[2], whole
        roles = ", ".join(str(message["role"]) for message in new)
        raise RolloutError(
            f"the chat template of {self._key} refuses the environment's messages (role {roles}) after "
            f"{len(messages)} messages: {refusal}; use an environment with roles that the template has, or another "
            f"{self._key}.chat_template"
        ) from refusal

    def _after_turn(self, tokens: LocatedTokens, stop: int, shared: int) -> Ids:
        """Return the tokens after the turn, which stops at character `stop`.

        shared: number of characters after it that do not depend on what follows.
        """
        first, last = np.searchsorted(tokens.starts, [stop, stop + shared], "left").tolist()
        ends = [i for i in range(first, last) if int(tokens.ids[i]) in self._turn_ends]
        if ends:
            return tokens.ids[ends[0] + 1 :]
        return np.array(encode(self._tokenizer, tokens.text[stop:]), np.int32)

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        return self._whole.template.render(messages, tools, add_generation_prompt=add_generation_prompt)


def build_renderer(
    tokenizer: PreTrainedTokenizerBase,
    is_chat: bool,
    template_kwargs: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    *,
    key: str = "student",
) -> Renderer:
    """Return a renderer of conversations or of texts. Raises AlignmentError as the renderers do."""
    if not is_chat:
        return TextRenderer(tokenizer, vocab_size)
    return ConversationRenderer(tokenizer, template_kwargs, vocab_size, key=key)


def _messages_of(prompt: Prompt) -> Sequence[Message]:
    assert not isinstance(prompt.content, str), "a conversation renderer is for prompts that are conversations"
    return prompt.content


def _unused_character(messages: Sequence[Message]) -> str:
    used = set(json.dumps(list(messages), ensure_ascii=False, default=str))
    return next(character for character in map(chr, _PRIVATE_USE) if character not in used)


def _as_texts(messages: Sequence[Message], mark: str) -> list[Message]:
    """Return the messages with the model's turns as it wrote them, calls included, and the mark as the last."""
    return [*map(_as_written, messages[:-1]), {"role": "assistant", "content": mark}]


def _as_calls(messages: Sequence[Message], mark: str) -> list[Message]:
    """Return the messages with calls in place of the texts that contain them, and marked calls as the last."""
    names = [call["function"]["name"] for call in valid_calls(messages[-1])] or ["unknown"]
    calls = [{"type": "function", "function": {"name": name, "arguments": {mark: mark}}} for name in names]
    return [*map(_as_called, messages[:-1]), {"role": "assistant", "content": "", "tool_calls": calls}]


def _as_written(message: Message) -> Message:
    if message["role"] != "assistant" or not message.get("content"):
        return message
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _as_called(message: Message) -> Message:
    calls = valid_calls(message)
    return {**message, "content": "", "tool_calls": calls} if calls else _as_written(message)
