"""Tool calls in an assistant's text, in the chat template's format.

A call is `{"type": "function", "function": {"name": …, "arguments": {…}}}`, as in a message's `tool_calls`. A text that
looks like a call but cannot be parsed is `{"type": "malformed", "text": …, "error": …}`, so that it can be answered.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from nemo_opd.data.continuation import Ids
from nemo_opd.data.record import Message
from nemo_opd.rollout.renderer import Tools

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Parse = Callable[[str], list[Message]]

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PYTHON_TAG = "<|python_tag|>"
_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_BARE = re.compile(r'\s*\{\s*"(?:name|type|function|arguments|parameters)"\s*:')
_PROBE: list[Message] = [
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "probe_name", "arguments": {"probe_key": 1}}}],
    },
]


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
            if self._has_template:
                parsed = self._tokenizer.parse_response(text, prefix=prefix, tools=list(tools or ()) or None)
            else:
                parsed = self._tokenizer.parse_response(text)
            return [_checked_call(call, text) for call in parsed.get("tool_calls") or ()]
        except Exception as error:  # the tokenizer's schema may fail with any exception
            return [_malformed(text, " ".join(str(error).split()))]


def valid_calls(message: Message) -> list[Message]:
    return [call for call in message.get("tool_calls") or () if call.get("type") != "malformed"]


def _malformed(text: str, error: str) -> Message:
    return {"type": "malformed", "text": text, "error": error}


def written_call(tokenizer: PreTrainedTokenizerBase, template_kwargs: Mapping[str, Any]) -> str:
    """Return the chat template's text for a probe call; empty if the template fails."""
    try:
        return str(tokenizer.apply_chat_template(_PROBE, tokenize=False, **template_kwargs))
    except Exception:  # a template is a program: it may fail with any exception
        return ""


def parser_of(written: str) -> _Parse:
    if _OPEN in written:
        return tagged_calls
    return bare_calls if "probe_name" in written else any_calls


def any_calls(text: str) -> list[Message]:
    return tagged_calls(text) if _OPEN in text else bare_calls(text)


def tagged_calls(text: str) -> list[Message]:
    """Parse every `<tool_call>{"name": …, "arguments": {…}}</tool_call>`."""
    calls = []
    for part in text.split(_OPEN)[1:]:
        written, closed, _ = part.partition(_CLOSE)
        calls.append(_call_of(written.strip()) if closed else _malformed(written, f"{_CLOSE} is missing"))
    return calls


def bare_calls(text: str) -> list[Message]:
    """Parse `{"name": …, "parameters": {…}}` as an entire turn, or after `<|python_tag|>`.

    Calls are separated by white space, commas or semicolons.
    """
    _, tag, calls = text.rpartition(_PYTHON_TAG)
    return list(_json_calls(calls)) if tag or _BARE.match(text) else []


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


def function_tool(name: str, description: str, parameters: Mapping[str, str], required: Sequence[str]) -> Message:
    """Return the schema of a tool whose parameters are strings: name → description."""
    properties = {key: {"type": "string", "description": text} for key, text in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}
