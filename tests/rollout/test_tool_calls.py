"""Tool calls in the forms of chat templates, and texts that only look like calls."""

import copy
from typing import Any

import numpy as np
import pytest

from nemo_opd.alignment import templates
from nemo_opd.rollout.conversation import ToolCallParser, any_calls, bare_calls, parser_of, tagged_calls, written_call
from tests.rollout.scripted import encoded
from tests.rollout.templates import talking
from tests.tokenizers_fixture import real_tokenizer

CALL = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": "1 + 1"}}}
OTHER = {"type": "function", "function": {"name": "clock", "arguments": {}}}


def parsed(tokenizer: Any, text: str) -> list[dict[str, Any]]:
    prompt = encoded(tokenizer, "# user\nWhat?")
    ids = np.array([*prompt, *encoded(tokenizer, text)], np.int32)
    return ToolCallParser(tokenizer)(ids, len(prompt), None)


@pytest.mark.tokenizers
@pytest.mark.parametrize("name", ["qwen3", "tagged", "strict"])
@pytest.mark.parametrize("calls", [[CALL], [CALL, OTHER]])
def test_a_templates_calls_are_read_back(name: str, calls: list[dict[str, Any]]) -> None:
    """The oracle is the turn that the template renders for the calls."""
    tokenizer = real_tokenizer(name) if name == "qwen3" else talking(name)
    question = [{"role": "user", "content": "What?"}]
    messages = [*question, {"role": "assistant", "content": "", "tool_calls": calls if name != "strict" else [CALL]}]
    prompt = tokenizer.apply_chat_template(question, tokenize=False, add_generation_prompt=True)
    turn = tokenizer.apply_chat_template(messages, tokenize=False).removeprefix(prompt)
    turn = turn.partition("<|im_end|>")[0].partition("<|eom_id|>")[0]
    assert parsed(tokenizer, turn) == (calls if name != "strict" else [CALL])


@pytest.mark.tokenizers
def test_the_parser_follows_the_templates_form() -> None:
    assert parser_of(written_call(talking("tagged"), {})) is tagged_calls
    assert parser_of(written_call(talking("strict"), {})) is bare_calls
    assert parser_of(written_call(talking("without_ends"), {})) is any_calls
    assert parser_of(written_call(real_tokenizer("qwen3"), {"enable_thinking": False})) is tagged_calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "clock"}</tool_call>', [OTHER]),
        ('Let me see.\n<tool_call>\n{"name": "clock", "arguments": "{}"}\n</tool_call>', [OTHER]),
        ('<think><tool_call>{"name": "no"}</tool_call></think><tool_call>{"name": "clock"}</tool_call>', [OTHER]),
        ("no call", []),
        ('{"name": "clock"}', []),
    ],
)
def test_tagged(text: str, calls: list[dict[str, Any]]) -> None:
    assert parsed(talking("tagged"), text) == calls


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('{"name": "clock", "parameters": {}}', [OTHER]),
        ('<|python_tag|>{"name": "clock", "parameters": {}}; {"name": "clock"}', [OTHER, OTHER]),
        ('{"type": "function", "function": {"name": "clock"}}', [OTHER]),
        ('The set {"name"} is one.', []),
        ("{x: 1} is a set", []),
        ("4", []),
    ],
)
def test_bare(text: str, calls: list[dict[str, Any]]) -> None:
    assert parsed(talking("strict"), text) == calls


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("tagged", '<tool_call>{"name": "clock"', "</tool_call> is missing"),
        ("tagged", "<tool_call>clock()</tool_call>", "no JSON"),
        ("tagged", "<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON"),
        ("tagged", "<tool_call>[1]</tool_call>", 'no object with a "name"'),
        ("tagged", '<tool_call>{"name": 3}</tool_call>', 'no object with a "name"'),
        ("tagged", '<tool_call>{"name": "clock", "arguments": [1]}</tool_call>', "the arguments are no object"),
        ("tagged", '<tool_call>{"name": "clock", "arguments": "{"}</tool_call>', "the arguments are no JSON"),
        ("strict", "<|python_tag|>print(1)", "no JSON"),
        ("strict", '{"name": "clock", "parameters": {', "no JSON"),
    ],
)
def test_a_malformed_call_is_reported(name: str, text: str, error: str) -> None:
    (call,) = parsed(talking(name), text)
    assert call["type"] == "malformed"
    assert error in call["error"]


def test_a_good_call_beside_a_malformed_one_is_kept() -> None:
    first, second = parsed(talking("tagged"), '<tool_call>{</tool_call><tool_call>{"name": "clock"}</tool_call>')
    assert (first["type"], second) == ("malformed", OTHER)


RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "# assistant\n",
    "fields": {
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def test_a_tokenizers_own_response_template_comes_first() -> None:
    """Bug: a form that only transformers' response template describes is not read."""
    tokenizer = copy.deepcopy(talking("tagged"))
    tokenizer.response_template = RESPONSE_TEMPLATE
    assert parsed(tokenizer, 'Now: <call>{"name": "clock", "arguments": {}}</call>') == [OTHER]
    assert parsed(tokenizer, "Nothing to call.") == []
    (call,) = parsed(tokenizer, "<call>{</call>")
    assert call["type"] == "malformed"


def test_a_response_template_that_runs_forever_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a pattern in a model's tokenizer blocks the interpreter, and the run, without end."""
    tokenizer = copy.deepcopy(talking("tagged"))
    tokenizer.response_template = RESPONSE_TEMPLATE
    assert parsed(tokenizer, "Nothing to call.") == [], "the process has its imports"
    monkeypatch.setattr(templates, "TEMPLATE_S", 0.5)
    content = {"close_pattern": "(?:a|aa)+(?:aa|a)+(?:a|aa)+b", "content": "text"}
    tokenizer.response_template = {**RESPONSE_TEMPLATE, "fields": {"content": content}}
    (call,) = parsed(tokenizer, "a" * 200)
    assert call["type"] == "malformed"
    assert "did not return in 0.5 s of processor time" in call["error"]
