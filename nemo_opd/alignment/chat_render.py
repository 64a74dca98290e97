"""Renders a conversation by a tokenizer's own chat template and finds its messages in the tokens (methods.md §1.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.backend import name_of
from nemo_opd.alignment.chat import ChatTokens
from nemo_opd.alignment.chat_messages import Message, learned_messages, plain_messages, said_by
from nemo_opd.alignment.chat_spans import ContentSpan, common_prefix, locate_contents
from nemo_opd.alignment.chat_template import ChatTemplate
from nemo_opd.alignment.chat_tokens import LocatedTokens, locate_tokens
from nemo_opd.alignment.rendered_chat import RenderedChat
from nemo_opd.alignment.roles import roles_of
from nemo_opd.config.data import LearnedTurns
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Tools = Sequence[Mapping[str, Any]] | None

_ENDS_A_TURN = {"end_of_turn", "end_of_message", "eos"}
_OWN_ARGUMENTS = ("conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize")


class ChatRenderer:
    """Renderer of conversations by one tokenizer; can be pickled for loader workers.

    A special token that is spelled out in a content is read as that token, as `apply_chat_template` and the servers
    that use it read it. The edges of the content do not move.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        turns: LearnedTurns = "all",
    ) -> None:
        """Prepare a template. `template_kwargs` are its variables, such as `enable_thinking`. turns: that are learned.

        Raises AlignmentError for a tokenizer without a chat template, and for variables that the renderer sets.
        """
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._learned_turns = turns
        if not tokenizer.chat_template:
            raise AlignmentError(
                f"tokenizer {name_of(tokenizer)} has no chat template, so messages cannot be rendered; use the "
                "tokenizer of the instruct model, set its chat_template, or train on plain text"
            )
        if taken := [key for key in _OWN_ARGUMENTS if key in self._template_kwargs]:
            raise AlignmentError(f"template_kwargs sets {', '.join(taken)}, which rendering sets itself; remove it")
        self.template = ChatTemplate(tokenizer, self._template_kwargs)
        self._turn_ends = frozenset(i for i, roles in roles_of(tokenizer).items() if _ENDS_A_TURN & set(roles))

    @property
    def identity(self) -> tuple[object, ...]:
        """Everything but the vocabulary that decides how messages are rendered."""
        tokenizer = self._tokenizer
        variables = sorted(self._template_kwargs.items())
        return tokenizer.chat_template, variables, tokenizer.special_tokens_map, self._learned_turns

    def __call__(self, messages: Sequence[Message], tools: _Tools = None) -> ChatTokens:
        """Render and tokenize M messages to S tokens; a list of text parts is one content, None is an empty one.

        Raises AlignmentError for malformed messages and for those that the template refuses.
        """
        rendered = self.render(messages, tools)
        return self.tokens(rendered, locate_tokens(self._tokenizer, rendered.text))

    def render(self, messages: Sequence[Message], tools: _Tools = None) -> RenderedChat:
        """Render messages, and find each content in the text. Raises AlignmentError as a call does."""
        plain = plain_messages(messages)
        text = self._rendered(plain, tools)
        contents = locate_contents(lambda changed: self._rendered_or_none(changed, tools), plain, text)
        turns = _assistant_turns(plain, contents, text, self._generation_prompt(plain, tools, text))
        for k, written in turns.items():
            span = contents[k]
            if span is not None and span.fills_template:
                contents[k] = replace(span, start=written)
        return RenderedChat(text, plain, contents, turns)

    def prompt(self, messages: Sequence[Message], tools: _Tools = None) -> str:
        """Render messages up to the place at which the model takes over. Raises AlignmentError as a call does."""
        return self._rendered(plain_messages(messages), tools, add_generation_prompt=True)

    def tokens(self, rendered: RenderedChat, located: LocatedTokens) -> ChatTokens:
        """Find messages in tokens. located: of the rendered text, all or the first, to a `rendered.settled` place."""
        spans = located.spans(rendered.contents)
        mask = np.zeros(len(located.ids), np.bool_)
        is_learned = learned_messages(rendered.messages, self._learned_turns)
        for k, written in rendered.turns.items():
            has_calls = bool(rendered.messages[k].get("tool_calls"))
            spans[k, 1], end = self._turn_end(located, spans, k, calls=has_calls)
            mask[located.at(written) : end] = is_learned[k]
        return ChatTokens(located.ids, mask, spans, tuple(map(said_by, rendered.messages)))

    def _turn_end(self, tokens: LocatedTokens, spans: NDArray[np.int32], k: int, calls: bool) -> tuple[int, int]:
        """Find the ends of the content and of the turn of assistant message k.

        A template may end calls with a special token, as Llama's `<|eom_id|>`: what changes with the message then
        includes the end. It may also close calls with its own text.
        """
        start, stop = spans[k].tolist()
        if calls and stop > start and int(tokens.ids[stop - 1]) in self._turn_ends:
            stop -= 1
        limit = int(spans[k + 1, 0]) if k + 1 < len(spans) else len(tokens.ids)
        return stop, tokens.turn_end(stop, limit, self._turn_ends, past_text=calls)

    def _render(self, messages: Sequence[Message], tools: _Tools, add_generation_prompt: bool = False) -> str:
        return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)

    def _rendered_or_none(self, messages: Sequence[Message], tools: _Tools) -> str | None:
        """Render a conversation, or return None: a template is a program that may fail with any exception."""
        try:
            return self._render(messages, tools)
        except Exception:
            return None

    def _rendered(self, messages: Sequence[Message], tools: _Tools, add_generation_prompt: bool = False) -> str:
        try:
            return self._render(messages, tools, add_generation_prompt)
        except Exception as error:
            k = self._first_refused(messages, tools)
            raise AlignmentError(
                f"the chat template of {name_of(self._tokenizer)} refuses messages[{k}] (role "
                f"{messages[k]['role']!r}, {len(messages)} messages): {error}; change or drop this conversation, or "
                "set a chat_template that accepts it"
            ) from error

    def _first_refused(self, messages: Sequence[Message], tools: _Tools) -> int:
        stops = range(1, len(messages))
        return next((stop - 1 for stop in stops if self._rendered_or_none(messages[:stop], tools) is None), len(stops))

    def _generation_prompt(self, messages: Sequence[Message], tools: _Tools, text: str) -> str:
        """Return the template's text for the model to continue; empty where it has none."""
        if not any(message["role"] == "assistant" for message in messages):
            return ""
        prompted = self._render(messages, tools, add_generation_prompt=True)
        return prompted[common_prefix(prompted, text) :]


def _assistant_turns(
    messages: Sequence[Message], contents: Sequence[ContentSpan | None], text: str, prompt: str
) -> dict[int, int]:
    """Find, by assistant message, the character at which the model takes over from the generation prompt.

    Searched backwards in the template's text before the content. Where that has not all of the prompt (earlier turns
    do not repeat Qwen's empty thinking block, a turn with thinking fills it), the prompt's first line, its header.
    """
    lines = accumulate(prompt.splitlines(keepends=True))
    header = next((line for line in lines if line.strip()), prompt)
    heads = (prompt, header) if prompt else ()
    turns: dict[int, int] = {}
    previous = 0
    for k, (message, span) in enumerate(zip(messages, contents, strict=True)):
        if span is None:
            continue
        if message["role"] == "assistant":
            found = ((text.rfind(head, previous, span.start), len(head)) for head in heads)
            turns[k] = next((at + length for at, length in found if at >= 0), span.start)
        previous = span.stop
    return turns
