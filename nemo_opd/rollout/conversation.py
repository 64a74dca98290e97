"""Conversations in a model's chat template: their renderer, and the parser of tool calls in a turn."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_opd.alignment import ChatRenderer
from nemo_opd.alignment.chat import LocatedTokens, locate_tokens
from nemo_opd.alignment.chat_turns import common_prefix
from nemo_opd.alignment.templates import TemplateFailure, apply_template, parse_response
from nemo_opd.alignment.token_roles import turn_end_ids
from nemo_opd.data.row_types import Message, Prompt
from nemo_opd.data.text import Continued, Ids
from nemo_opd.errors import AlignmentError, DataError, RolloutError
from nemo_opd.rollout.renderer import Renderer, TextRenderer, Tools, encode, response_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_Parse = Callable[[str], list[Message]]
_CALL_START, _CALL_END = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_BARE_CALL = re.compile(r'\s*\{\s*"(?:name|type|function|arguments|parameters)"\s*:')
_PROBE_CALL: list[Message] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "probe_name", "arguments": {"probe_key": 1}}}],
    },
]
_PRIVATE_USE = range(0xF0000, 0xFFFFE)


def build_renderer(
    tokenizer: PreTrainedTokenizerBase,
    is_chat: bool,
    template_kwargs: Mapping[str, Any] | None = None,
    vocab_size: int | None = None,
    *,
    key: str = "student",
) -> Renderer:
    """Build a renderer of conversations or of texts. Raises AlignmentError as the renderers do."""
    if not is_chat:
        return TextRenderer(tokenizer, vocab_size)
    return ConversationRenderer(tokenizer, template_kwargs, vocab_size, key=key)


class ConversationRenderer(Renderer):
    """A renderer of conversations.

    Sampled tokens are never retokenized. The template's tokens between turns come from a rendering with a placeholder
    in place of the last turn; they start after that turn's end token.
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
        """template_kwargs: template variables, such as `enable_thinking`. vocab_size: number of ids the model can read,
        all by default. key: the model's section in the settings.

        Raises AlignmentError for a tokenizer without a chat template or with inexact tokens.
        """
        self._chat = ChatRenderer(tokenizer, template_kwargs=template_kwargs)
        super().__init__(tokenizer, vocab_size)
        self._key = key
        self._turn_ends = turn_end_ids(tokenizer)
        self._calls = ToolCallParser(tokenizer, template_kwargs)

    def prompt_ids(self, prompt: Prompt) -> Ids:
        """Return the tokens [P], including the generation prompt.

        Raises DataError if the template rejects the conversation or the model has no embedding for a token.
        """
        try:
            text = self._render(_messages_of(prompt), prompt.tools, add_generation_prompt=True)
        except TemplateFailure as error:
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0): the chat template of {self._key} refuses it: {error}; "
                f"change or leave out the row, or set {self._key}.chat_template to one that accepts it"
            ) from error
        ids = np.array(encode(self._tokenizer, text), np.int32)
        self._require_embeddings(ids, text)
        return ids

    def continued(self, prompt: Prompt) -> Continued:
        """Return the conversation with its response, up to and including the turn's end token.

        Raises DataError as `prompt_ids` does, and for a prompt without response.
        """
        answered = [*_messages_of(prompt), {"role": "assistant", "content": response_of(prompt)}]
        try:
            rendered = self._chat(answered, prompt.tools)
        except AlignmentError as error:
            raise DataError(f"prompt {prompt.index} (row, counted from 0): {error}") from error
        self._require_embeddings(rendered.ids, str(answered))
        stop = int(np.flatnonzero(rendered.assistant_mask).max(initial=-1)) + 1
        if not stop:
            raise DataError(
                f"prompt {prompt.index} (row, counted from 0): the chat template of {self._key} leaves out the "
                f"assistant's messages; set {self._key}.chat_template to one that writes them"
            )
        start = int(np.flatnonzero(~rendered.assistant_mask[:stop]).max(initial=-1)) + 1
        return Continued(rendered.ids[:stop], start, int(rendered.ids[stop - 1]) in self._turn_ends)

    def tool_calls(self, ids: Ids, start: int, tools: Tools) -> list[Message]:
        return self._calls(ids, start, tools)

    def between(self, messages: Sequence[Message], new: Sequence[Message], tools: Tools) -> Ids:
        """Return the tokens after the turn's end token, or after the turn if the template does not write one.

        Raises RolloutError if the template rejects the messages, DataError if the model has no embedding for a token.
        """
        used = set(json.dumps([*messages, *new], ensure_ascii=False, default=str))
        mark = next(character for character in map(chr, _PRIVATE_USE) if character not in used)
        ending, text = self._render_with_placeholder(messages, new, tools, mark)
        shared = common_prefix(ending, text.rpartition(mark)[2])
        ids = self._after_turn(locate_tokens(self._tokenizer, text), text.rindex(mark) + len(mark), shared)
        self._require_embeddings(ids, str(list(new)))
        return ids

    def shows_tools(self, tools: Tools) -> bool:
        question: list[Message] = [{"role": "user", "content": "?"}]
        return not tools or self._render(question, tools) != self._render(question, None)

    def _render_with_placeholder(
        self, messages: Sequence[Message], new: Sequence[Message], tools: Tools, mark: str
    ) -> tuple[str, str]:
        """Render the conversation with `mark` in place of its last turn.

        Returns the text after the mark if the conversation ends there, and the whole text with the `new` messages.
        """
        refusal: Exception = ValueError("it leaves out the student's messages")
        # Some templates require a call before a tool's answer.
        as_text = [*map(_without_parsed_calls, messages[:-1]), {"role": "assistant", "content": mark}]
        for marked in (as_text, _as_calls(messages, mark)):
            try:
                ending = self._render(marked, tools)
                text = self._render([*marked, *new], tools, add_generation_prompt=True)
            except TemplateFailure as error:
                refusal = error
                continue
            if mark in ending and mark in text:
                return ending.rpartition(mark)[2], text
        roles = ", ".join(str(message["role"]) for message in new)
        raise RolloutError(
            f"the chat template of {self._key} refuses the environment's messages (role {roles}) after "
            f"{len(messages)} messages: {refusal}; use an environment whose roles the template supports, or another "
            f"{self._key}.chat_template"
        ) from refusal

    def _after_turn(self, tokens: LocatedTokens, stop: int, shared: int) -> Ids:
        """Return the tokens after the turn's end token, which starts between characters `stop` and `stop + shared`.

        stop: end of the turn's text. shared: number of characters after it that do not depend on the next messages.
        Without an end token there, the text after `stop` is tokenized by itself.
        """
        first, last = np.searchsorted(tokens.starts, [stop, stop + shared], "left").tolist()
        ends = [i for i in range(first, last) if int(tokens.ids[i]) in self._turn_ends]
        if ends:
            return tokens.ids[ends[0] + 1 :]
        return np.array(encode(self._tokenizer, tokens.text[stop:]), np.int32)

    def _render(self, messages: Sequence[Message], tools: Tools, add_generation_prompt: bool = False) -> str:
        return self._chat.template.render(messages, tools, add_generation_prompt=add_generation_prompt)


def _messages_of(prompt: Prompt) -> Sequence[Message]:
    assert not isinstance(prompt.content, str), "a conversation renderer is for prompts that are conversations"
    return prompt.content


def _as_calls(messages: Sequence[Message], mark: str) -> list[Message]:
    """Replace the last turn by calls that contain the mark, and texts that contain calls by these calls."""
    names = [call["function"]["name"] for call in _valid_calls(messages[-1])] or ["unknown"]
    calls = [{"type": "function", "function": {"name": name, "arguments": {mark: mark}}} for name in names]
    return [*map(_with_parsed_calls, messages[:-1]), {"role": "assistant", "content": "", "tool_calls": calls}]


def _without_parsed_calls(message: Message) -> Message:
    if message["role"] != "assistant" or not message.get("content"):
        return message
    return {key: value for key, value in message.items() if key != "tool_calls"}


def _with_parsed_calls(message: Message) -> Message:
    calls = _valid_calls(message)
    return {**message, "content": "", "tool_calls": calls} if calls else _without_parsed_calls(message)


def _valid_calls(message: Message) -> list[Message]:
    return [call for call in message.get("tool_calls") or () if call.get("type") != "malformed"]


class ToolCallParser:
    """A parser of tool calls in a turn.

    It uses the tokenizer's response template or schema if it has one (transformers 5), else the chat template's format:
    `<tool_call>{json}</tool_call>`, or JSON alone with or without `<|python_tag|>`. If the template writes neither,
    both formats are parsed.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any] | None = None) -> None:
        self._tokenizer = tokenizer
        self._has_template = getattr(tokenizer, "response_template", None) is not None
        self._has_schema = getattr(tokenizer, "response_schema", None) is not None
        self._parse = parser_of(written_call(tokenizer, template_kwargs or {}))

    def __call__(self, ids: Ids, start: int, tools: Tools) -> list[Message]:
        """Return the calls of the turn [start, S) of ids [S], in order."""
        text = self._decoded(ids[start:])
        if self._has_template or self._has_schema:
            return self._parse_with_tokenizer(text, self._decoded(ids[:start]), tools)
        return self._parse(_THINKING.sub("", text))

    def _decoded(self, ids: Ids) -> str:
        """Decode with special tokens, which may delimit calls."""
        return str(self._tokenizer.decode(ids.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def _parse_with_tokenizer(self, text: str, prefix: str, tools: Tools) -> list[Message]:
        try:
            settings = {"prefix": prefix, "tools": list(tools or ()) or None} if self._has_template else {}
            parsed = parse_response(self._tokenizer, text, **settings)
            return [_checked_call(call, text) for call in parsed.get("tool_calls") or ()]
        except Exception as error:  # what the tokenizer's template returns may have any form
            return [_malformed(text, " ".join(str(error).split()))]


def parser_of(written: str) -> _Parse:
    if _CALL_START in written:
        return tagged_calls
    return bare_calls if "probe_name" in written else any_calls


def written_call(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    """Return the chat template's text for a probe call; empty if the template fails."""
    try:
        return apply_template(tokenizer, _PROBE_CALL, **template_kwargs)
    except TemplateFailure:
        return ""


def any_calls(text: str) -> list[Message]:
    return tagged_calls(text) if _CALL_START in text else bare_calls(text)


def tagged_calls(text: str) -> list[Message]:
    """Parse every `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    calls = []
    for part in text.split(_CALL_START)[1:]:
        written, closed, _ = part.partition(_CALL_END)
        calls.append(_call_of(written.strip()) if closed else _malformed(written, f"{_CALL_END} is missing"))
    return calls


def bare_calls(text: str) -> list[Message]:
    """Parse `{"name": …, "parameters": {…}}` as an entire turn, or after `<|python_tag|>`.

    Calls are separated by white space, commas or semicolons.
    """
    _, tag, calls = text.rpartition(_PYTHON_TAG)
    return list(_json_calls(calls)) if tag or _BARE_CALL.match(text) else []


def _json_calls(text: str) -> Iterator[Message]:
    text = text.lstrip()
    while True:
        try:
            value, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError) as error:
            yield _malformed(text, f"no JSON: {error}")
            return
        yield _checked_call(value, text[:end])
        text = text[end:].lstrip(" \t\r\n,;")
        if not text.startswith("{"):
            return


def _call_of(written: str) -> Message:
    try:
        value = json.loads(written)
    except (ValueError, RecursionError) as error:
        return _malformed(written, f"no JSON: {error}")
    return _checked_call(value, written)


def _checked_call(value: object, written: str) -> Message:
    """Validate a parsed call. Its `arguments` may be called `parameters`, be a JSON string, or be missing."""
    call = value.get("function", value) if isinstance(value, dict) else value
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        return _malformed(written, 'no object with a "name"')
    arguments = call.get("arguments", call.get("parameters")) or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return _malformed(written, f"the arguments are no JSON: {error}")
    if not isinstance(arguments, dict):
        return _malformed(written, "the arguments are no object")
    return {"type": "function", "function": {"name": call["name"], "arguments": arguments}}


def _malformed(text: str, error: str) -> Message:
    return {"type": "malformed", "text": text, "error": error}


def function_tool(name: str, description: str, parameters: Mapping[str, str], required: Sequence[str]) -> Message:
    """Return the schema of a tool whose parameters are strings: name → description."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
