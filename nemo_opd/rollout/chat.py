"""Conversations in which the student takes turns, by its chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_opd.alignment import ChatRenderer, pieces_of, roles_of
from nemo_opd.alignment.chat_spans import common_prefix
from nemo_opd.alignment.chat_tokens import LocatedTokens, locate_tokens
from nemo_opd.data.continuation import Continued, Ids
from nemo_opd.data.record import Message, Prompt
from nemo_opd.data.samples import require_ids
from nemo_opd.errors import AlignmentError, DataError, RolloutError
from nemo_opd.rollout.prompts import Tools
from nemo_opd.rollout.text import num_tokens, response_of, shortened, spelled
from nemo_opd.rollout.tool_calls import ToolCallParser, valid_calls

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ENDS_A_TURN = {"end_of_turn", "end_of_message", "eos"}
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


class ConversationRenderer:
    """Prompts that are conversations.

    What was sampled is never tokenized again: the template's tokens after a turn are taken from a rendering in which a
    placeholder stands for the turn, behind the token that ends it.
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
        """`template_kwargs` are variables of the template, such as `enable_thinking`; `vocab_size`: ids the model can
        read, all by default; `key`: what the model is called in the settings.

        Raises AlignmentError for a tokenizer without a chat template or whose tokens lack exact bytes.
        """
        self._tokenizer, self._key = tokenizer, key
        self._template_kwargs = dict(template_kwargs or {})
        self._whole = ChatRenderer(tokenizer, template_kwargs=self._template_kwargs)
        self._pieces = pieces_of(tokenizer)
        self._vocab_size = vocab_size or self._pieces.vocab_size
        self._turn_ends = frozenset(i for i, roles in roles_of(tokenizer).items() if _ENDS_A_TURN & set(roles))
        self._calls = ToolCallParser(tokenizer, self._template_kwargs)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """[P], the generation prompt included.

        Raises DataError where the template refuses the conversation, or for a token that the model cannot read.
        """
        try:
            text = self._render(messages_of(prompt), prompt.tools, add_generation_prompt=True)
        except Exception as error:  # a template is a program: it may fail with any exception
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0): the chat template of {self._key} refuses it: {error}; "
                f"change or leave out the row, or set {self._key}.chat_template to one that accepts it"
            ) from error
        ids = np.array(self._encoded(text), np.int32)
        require_ids(ids, self._vocab_size, self._tokenizer, text)
        return ids

    def continued(self, prompt: Prompt) -> Continued:
        """The conversation and its response, through the token that ends the turn.

        Raises DataError as `prompt_ids` does, and where there is no response.
        """
        answered = [*messages_of(prompt), {"role": "assistant", "content": response_of(prompt)}]
        try:
            whole = self._whole(answered, prompt.tools)
        except AlignmentError as error:
            raise DataError(f"prompt {prompt.index} (row, counted from 0): {error}") from error
        require_ids(whole.ids, self._vocab_size, self._tokenizer, str(answered))
        stop = int(np.flatnonzero(whole.assistant_mask).max(initial=-1)) + 1
        if not stop:
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0): the chat template of {self._key} leaves out what the "
                f"assistant says; set {self._key}.chat_template to one that writes it"
            )
        start = int(np.flatnonzero(~whole.assistant_mask[:stop]).max(initial=-1)) + 1
        return Continued(whole.ids[:stop], start, int(whole.ids[stop - 1]) in self._turn_ends)

    def text(self, ids: Ids) -> str:
        return spelled(self._pieces, ids)

    def tool_calls(self, ids: Ids, start: int, tools: Tools) -> list[Message]:
        return self._calls(ids, start, tools)

    def between(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> Ids:
        """Behind the token by which the template ends the student's turn; all behind the turn where it has none.

        Raises RolloutError where the template refuses the messages, DataError for a token that the model cannot read.
        """
        mark = unused_character([*messages, *new])
        alone, text = self._marked(messages, new, tools, mark)
        shared = common_prefix(alone, text.rpartition(mark)[2])
        ids = self._behind_turn(locate_tokens(self._tokenizer, text), text.rindex(mark) + len(mark), shared)
        require_ids(ids, self._vocab_size, self._tokenizer, str(list(new)))
        return ids

    def shows_tools(self, tools: Tools) -> bool:
        question: list[Message] = [{"role": "user", "content": "?"}]
        return not tools or self._render(question, tools) != self._render(question, None)

    def num_tokens(self, text: str) -> int:
        return num_tokens(self._tokenizer, text)

    def shortened(self, text: str, max_tokens: int) -> str:
        return shortened(self._tokenizer, text, max_tokens)

    def _marked(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools, mark: str) -> tuple[str, str]:
        """The template's text behind the placeholder where the conversation ends there, and the whole that goes on.

        Some templates want a call before a tool's answer.
        """
        refusal: Exception = ValueError("it leaves out what the student says")
        for said in (as_texts(messages, mark), as_calls(messages, mark)):
            try:
                alone = self._render(said, tools)
                whole = self._render([*said, *new], tools, add_generation_prompt=True)
            except Exception as error:  # a template is a program: it may fail with any exception
                refusal = error
                continue
            if mark in alone and mark in whole:
                return alone.rpartition(mark)[2], whole
        roles = ", ".join(str(message["role"]) for message in new)
        raise RolloutError(
            f"the chat template of {self._key} refuses what the environment says (role {roles}) after "
            f"{len(messages)} messages: {refusal}; use an environment with roles that the template has, or another "
            f"{self._key}.chat_template"
        ) from refusal

    def _behind_turn(self, tokens: LocatedTokens, stop: int, shared: int) -> Ids:
        """The turn stops at a character; `shared` characters behind that do not depend on what follows."""
        first, last = np.searchsorted(tokens.starts, [stop, stop + shared], "left").tolist()
        ends = [i for i in range(first, last) if int(tokens.ids[i]) in self._turn_ends]
        if ends:
            return tokens.ids[ends[0] + 1 :]
        return np.array(self._encoded(tokens.text[stop:]), np.int32)

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                list(messages),
                tools=list(tools) if tools else None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **self._template_kwargs,
            )
        )

    def _encoded(self, text: str) -> list[int]:
        """The template writes its special tokens itself."""
        return self._tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]


def messages_of(prompt: Prompt) -> Sequence[Message]:
    assert not isinstance(prompt.content, str), "a conversation renderer is for prompts that are conversations"
    return prompt.content


def unused_character(messages: Sequence[Message]) -> str:
    used = set(json.dumps(list(messages), ensure_ascii=False, default=str))
    return next(character for character in map(chr, _PRIVATE_USE) if character not in used)


def as_texts(messages: Sequence[Message], mark: str) -> list[Message]:
    """The student's turns as it wrote them, calls included, and the mark as the last of them."""
    return [*map(as_written, messages[:-1]), {"role": "assistant", "content": mark}]


def as_calls(messages: Sequence[Message], mark: str) -> list[Message]:
    """Calls in place of the texts that hold them, and marked calls as the last."""
    names = [call["function"]["name"] for call in valid_calls(messages[-1])] or ["unknown"]
    calls = [{"type": "function", "function": {"name": name, "arguments": {mark: mark}}} for name in names]
    return [*map(as_called, messages[:-1]), {"role": "assistant", "content": "", "tool_calls": calls}]


def as_written(message: Message) -> Message:
    if message["role"] != "assistant" or not message.get("content"):
        return message
    return {key: value for key, value in message.items() if key != "tool_calls"}


def as_called(message: Message) -> Message:
    calls = valid_calls(message)
    return {**message, "content": "", "tool_calls": calls} if calls else as_written(message)
