"""Rendering of conversations by a tokenizer's own chat template, and location of their messages (methods.md §1.5)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_opd.alignment.backend import name_of
from nemo_opd.alignment.chat import ChatTokens
from nemo_opd.alignment.chat_messages import Message, learned_messages, message_texts, plain_messages
from nemo_opd.alignment.chat_template import ChatTemplate
from nemo_opd.alignment.chat_tokens import LocatedTokens, locate_tokens
from nemo_opd.alignment.chat_turns import TurnTokens, locate_messages
from nemo_opd.alignment.rendered_chat import RenderedChat
from nemo_opd.alignment.template_roles import stop_ids
from nemo_opd.alignment.token_roles import turn_end_ids
from nemo_opd.config.data import LearnedTurns
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Tools = Sequence[Mapping[str, Any]] | None

_RESERVED_ARGUMENTS = ("conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize")


class ChatRenderer:
    """A renderer of conversations for one tokenizer. Picklable for loader workers.

    A special token spelled out in a content is read as that token, as `apply_chat_template` and servers that use it do.
    It does not move the content's edges.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        template_kwargs: Mapping[str, Any] | None = None,
        turns: LearnedTurns = "all",
    ) -> None:
        """Prepare a template. template_kwargs: its variables, such as `enable_thinking`. turns: which ones are learned.

        Raises AlignmentError for a tokenizer without a chat template, and for variables that the renderer itself sets.
        """
        self._tokenizer = tokenizer
        self._template_kwargs = dict(template_kwargs or {})
        self._learned_turns = turns
        if not tokenizer.chat_template:
            raise AlignmentError(
                f"tokenizer {name_of(tokenizer)} has no chat template, so messages cannot be rendered; use the "
                "tokenizer of the instruct model, set its chat_template, or train on plain text"
            )
        if reserved := [key for key in _RESERVED_ARGUMENTS if key in self._template_kwargs]:
            raise AlignmentError(f"template_kwargs sets {', '.join(reserved)}, which the renderer sets; remove it")
        self.template = ChatTemplate(tokenizer, self._template_kwargs)
        self._added = frozenset(tokenizer.added_tokens_decoder)
        self._turn_tokens = _turn_tokens(tokenizer)

    @property
    def identity(self) -> tuple[object, ...]:
        """Everything except the vocabulary that determines how messages are rendered."""
        tokenizer = self._tokenizer
        variables = sorted(self._template_kwargs.items())
        return tokenizer.chat_template, variables, tokenizer.special_tokens_map, self._learned_turns

    def __call__(self, messages: Sequence[Message], tools: _Tools = None) -> ChatTokens:
        """Render and tokenize M messages to S tokens. A list of text parts is one content, None is an empty one.

        Raises AlignmentError for malformed messages and for messages that the template rejects.
        """
        rendered = self.render(messages, tools)
        return self.tokens(rendered, locate_tokens(self._tokenizer, rendered.text))

    def render(self, messages: Sequence[Message], tools: _Tools = None) -> RenderedChat:
        """Render messages and find each content in the text. Raises AlignmentError as a call does."""
        plain = plain_messages(messages)
        text = self._render(plain, tools)
        contents, turns = locate_messages(
            lambda part, prompt: self.template.render_or_none(part, tools, add_generation_prompt=prompt),
            plain,
            text,
            self._turn_tokens,
        )
        return RenderedChat(text, plain, contents, turns)

    def prompt(self, messages: Sequence[Message], tools: _Tools = None) -> str:
        """Render messages and the generation prompt. Raises AlignmentError as a call does."""
        return self._render(plain_messages(messages), tools, add_generation_prompt=True)

    def tokens(self, rendered: RenderedChat, located: LocatedTokens) -> ChatTokens:
        """Find messages in tokens. located: tokens of the rendered text, all or only the first."""
        mask = np.zeros(len(located.ids), np.bool_)
        is_learned = learned_messages(rendered.messages, self._learned_turns)
        for k, turn in rendered.turns.items():
            for span in turn.spans:
                mask[located.inside(span, self._added)] |= is_learned[k]
        spans = located.spans(rendered.contents)
        return ChatTokens(located.ids, mask, spans, tuple(map(message_texts, rendered.messages)))

    def _render(self, messages: Sequence[Message], tools: _Tools, add_generation_prompt: bool = False) -> str:
        try:
            return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except Exception as error:
            k = self._first_rejected(messages, tools)
            raise AlignmentError(
                f"the chat template of {name_of(self._tokenizer)} refuses messages[{k}] (role "
                f"{messages[k]['role']!r}, {len(messages)} messages): {error}; change or drop this conversation, or "
                "set a chat_template that accepts it"
            ) from error

    def _first_rejected(self, messages: Sequence[Message], tools: _Tools) -> int:
        stops = range(1, len(messages))
        return next(
            (stop - 1 for stop in stops if self.template.render_or_none(messages[:stop], tools) is None), len(stops)
        )


def _turn_tokens(tokenizer: PreTrainedTokenizerBase) -> TurnTokens:
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    stops, turn_ends = ([added[i] for i in ids if i in added] for ids in (stop_ids(tokenizer), turn_end_ids(tokenizer)))
    return TurnTokens.of(added.values(), stops, turn_ends)
