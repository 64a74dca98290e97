"""Rendering of conversations by a tokenizer's own chat template, and pieces that it leaves out (methods.md §1.5)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from nemo_opd.alignment.chat import ChatTokens, LocatedTokens, locate_tokens
from nemo_opd.alignment.chat_template import (
    THINKING,
    ChatTemplate,
    Message,
    Tools,
    learned_messages,
    message_texts,
    plain_messages,
)
from nemo_opd.alignment.chat_turns import Span, Turn, TurnTokens, locate_messages
from nemo_opd.alignment.pieces import name_of
from nemo_opd.alignment.templates import TemplateFailure
from nemo_opd.alignment.token_roles import stop_ids, turn_end_ids
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_opd.config.data import LearnedTurns

Piece = Literal[
    "tool calls",
    "what the assistant says",
    "what the assistant says beside a call",
    "the reasoning of the last message",
    "tools' results",
    "system messages",
    "what the user says",
]
"""Piece of a message."""
PIECES: tuple[Piece, ...] = get_args(Piece)

_OPENING_TAG = re.compile(r"(<[^<>/]*(?:think|reason|thought)[^<>/]*>|\[THINK\])\s*\Z", re.IGNORECASE)
_RESERVED_ARGUMENTS = ("conversation", "tools", "add_generation_prompt", "continue_final_message", "tokenize")


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """A rendered conversation. Places are indices of characters in `text`."""

    text: str
    messages: Sequence[Message]
    contents: Sequence[Span | None]
    """Span of each message's content; None if the template leaves the message out."""
    turns: Mapping[int, Turn]
    """Turns keyed by assistant message."""

    def after(self, first: int) -> RenderedChat:
        """Return the same text as a rendering of the messages from `first` on."""
        turns = {k - first: turn for k, turn in self.turns.items() if k >= first}
        return RenderedChat(self.text, self.messages[first:], self.contents[first:], turns)

    def counterpart(self, place: int, other: RenderedChat) -> int:
        """Return the place in `other`, another rendering of the conversation, that corresponds to `place` here.

        Inside a content, that is the same distance from its beginning if both say the same so far, otherwise its end.
        """
        for k, span in enumerate(self.contents):
            theirs = other.contents[k]
            if span is None or theirs is None or span.stop <= place:
                continue
            if place <= span.start:
                return theirs.start
            stop = theirs.start + place - span.start
            is_alike = self.text[span.start : place] == other.text[theirs.start : stop]
            return stop if is_alike and stop < theirs.stop else theirs.stop
        return len(other.text)


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
                "tokenizer of the instruct model, set its chat_template, such as plain, or train on plain text"
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

    def __call__(self, messages: Sequence[Message], tools: Tools = None) -> ChatTokens:
        """Render and tokenize M messages to S tokens. A list of text parts is one content, None is an empty one.

        Raises AlignmentError for malformed messages and for messages that the template rejects.
        """
        rendered = self.render(messages, tools)
        return self.tokens(rendered, locate_tokens(self._tokenizer, rendered.text))

    def render(self, messages: Sequence[Message], tools: Tools = None) -> RenderedChat:
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

    def prompt(self, messages: Sequence[Message], tools: Tools = None) -> str:
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

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        try:
            return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)
        except TemplateFailure as error:
            k = self._first_rejected(messages, tools)
            raise AlignmentError(
                f"the chat template of {name_of(self._tokenizer)} refuses messages[{k}] (role "
                f"{messages[k]['role']!r}, {len(messages)} messages): {error}; change or drop this conversation, or "
                "set a chat_template that accepts it"
            ) from error

    def _first_rejected(self, messages: Sequence[Message], tools: Tools) -> int:
        stops = range(1, len(messages))
        return next(
            (stop - 1 for stop in stops if self.template.render_or_none(messages[:stop], tools) is None), len(stops)
        )


def _turn_tokens(tokenizer: PreTrainedTokenizerBase) -> TurnTokens:
    added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}
    stops, turn_ends = ([added[i] for i in ids if i in added] for ids in (stop_ids(tokenizer), turn_end_ids(tokenizer)))
    return TurnTokens.of(added.values(), stops, turn_ends)


def omitted_pieces(template: ChatTemplate, messages: Sequence[Message], tools: Tools = None) -> list[set[Piece]]:
    """Return the pieces of each plain message that the template leaves out.

    Each piece is replaced by words that occur nowhere else, which are then looked up. Takes one rendering, or one per
    message if the template rejects the words. Reasoning is checked only in a last assistant message: many templates
    drop earlier reasoning on purpose.
    """
    marked = [_WordMessage(k, message, k == len(messages) - 1) for k, message in enumerate(messages)]
    rendered = template.render_or_none([worded.message for worded in marked], tools)
    if rendered is not None:
        return [worded.missing(rendered) for worded in marked]
    omitted: list[set[Piece]] = []
    for k, worded in enumerate(marked):
        alone = template.render_or_none([*messages[:k], worded.message, *messages[k + 1 :]], tools)
        omitted.append(set() if alone is None else worded.missing(alone))
    return omitted


def missing_opening_tag(template: ChatTemplate, messages: Sequence[Message], tools: Tools = None) -> str | None:
    """Return the thinking tag that ends the generation prompt, if the assistant's last turn lacks it."""
    if len(messages) < 2 or messages[-1]["role"] != "assistant":
        return None
    prompt = template.render_or_none(messages[:-1], tools, add_generation_prompt=True)
    text = template.render_or_none(messages, tools)
    tag = None if prompt is None else _OPENING_TAG.search(prompt)
    if prompt is None or text is None or tag is None or text.startswith(prompt[: tag.end(1)]):
        return None
    return tag.group(1)


class _WordMessage:
    """A message whose pieces are replaced by unique words."""

    def __init__(self, k: int, message: Message, is_last: bool) -> None:
        self._words = (f"zq{k:05}x{i:03}qz" for i in count())
        self._words_of: dict[Piece, list[str]] = {}
        self.message = dict(message)
        calls = message.get("tool_calls") or ()
        if (message.get("content") or "").strip():
            self.message["content"] = self._word(_piece(message["role"], bool(calls)))
        if calls:
            self.message["tool_calls"] = [self._call(call) for call in calls]
        # Keys of OpenAI's API that few templates read.
        if isinstance(message.get("function_call"), Mapping):
            self.message["function_call"] = self._call(message["function_call"])
        if isinstance(refusal := message.get("refusal"), str) and refusal.strip():
            self.message["refusal"] = self._word("what the assistant says")
        thoughts = [key for key in THINKING if isinstance(message.get(key), str) and message[key].strip()]
        if thoughts and is_last and message["role"] == "assistant":
            # Some files repeat a thought under several keys, and a template reads one of them.
            self.message |= dict.fromkeys(thoughts, self._word("the reasoning of the last message"))

    def missing(self, rendered: str) -> set[Piece]:
        """Return the pieces with a word that the rendering lacks."""
        return {piece for piece, words in self._words_of.items() if any(word not in rendered for word in words)}

    def _word(self, piece: Piece) -> str:
        word = next(self._words)
        self._words_of.setdefault(piece, []).append(word)
        return word

    def _call(self, call: Message) -> Message:
        if isinstance(call.get("function"), Mapping):
            return {**call, "function": self._call(call["function"])}
        marked = {**call, "name": self._word("tool calls")}
        if isinstance(arguments := call.get("arguments"), Mapping):
            marked["arguments"] = {key: self._value(value) for key, value in arguments.items()}
        return marked

    def _value(self, value: Any) -> Any:
        return self._word("tool calls") if isinstance(value, str) else value


def _piece(role: str, has_calls: bool) -> Piece:
    if role == "assistant":
        return "what the assistant says beside a call" if has_calls else "what the assistant says"
    if role == "user":
        return "what the user says"
    return "system messages" if role in ("system", "developer") else "tools' results"
