"""Spans of contents and masks of the model's turns, on real and synthetic templates."""

import pickle
from typing import Any

import numpy as np
import pytest
from tokenizers import pre_tokenizers, processors

from nemo_opd.alignment import ChatRenderer, ChatTokens
from nemo_opd.errors import AlignmentError
from tests.alignment.chat_fixture import TRIMMED, assistant, call, small_chat, system, tool, user, with_template
from tests.alignment.chat_oracle import check_tokens, qwen3
from tests.tokenizers_fixture import byte_level, real_tokenizer

TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call>'
THOUGHT = "<think>\nwhy\n</think>\n\n"
EMPTY_THOUGHT = "<think>\n\n</think>\n\n"


def decoded(tokenizer: Any, ids: Any) -> str:
    return tokenizer.decode(ids, clean_up_tokenization_spaces=False)


def contents(tokenizer: Any, tokens: ChatTokens) -> list[str]:
    return [decoded(tokenizer, tokens.ids[start:stop]) for start, stop in tokens.spans.tolist()]


def turns(tokenizer: Any, tokens: ChatTokens) -> list[str]:
    edges = np.flatnonzero(np.diff([0, *tokens.assistant_mask.astype(int).tolist(), 0]))
    return [decoded(tokenizer, tokens.ids[start:stop]) for start, stop in edges.reshape(-1, 2).tolist()]


@pytest.mark.tokenizers
@pytest.mark.parametrize(
    ("thinking", "answer", "content", "turn"),
    [
        (None, assistant("yes"), "yes", EMPTY_THOUGHT + "yes"),
        (True, assistant("yes"), "yes", EMPTY_THOUGHT + "yes"),
        (False, assistant("yes"), "yes", "yes"),
        (None, assistant(THOUGHT + "yes"), THOUGHT + "yes", THOUGHT + "yes"),
        (True, assistant("yes", reasoning_content="why"), THOUGHT + "yes", THOUGHT + "yes"),
        (False, assistant("yes", reasoning_content="why"), "why\n</think>\n\nyes", "why\n</think>\n\nyes"),
        (False, assistant(""), "", ""),
    ],
)
def test_thinking(thinking: bool | None, answer: dict[str, Any], content: str, turn: str) -> None:
    """Bug: the mask starts too early: an empty thinking block is the model's unless the generation prompt has it."""
    tokenizer = real_tokenizer("qwen3")
    render = ChatRenderer(tokenizer, template_kwargs={} if thinking is None else {"enable_thinking": thinking})
    tokens = render([user("a"), assistant(THOUGHT + "first"), user("b"), answer])
    assert contents(tokenizer, tokens) == ["a", "first", "b", content]
    assert turns(tokenizer, tokens) == ["first<|im_end|>", turn + "<|im_end|>"]


@pytest.mark.tokenizers
def test_thinking_disabled_in_several_turns() -> None:
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    tokens = ChatRenderer(real_tokenizer("qwen3"), template_kwargs={"enable_thinking": False})(messages)
    check_tokens(real_tokenizer("qwen3"), tokens, qwen3(messages, thinking=False))


@pytest.mark.tokenizers
def test_tool_calls_are_the_models_own() -> None:
    """Bugs: calls are missing in the loss; results are in it.

    The template's text after the system prompt shares a token with its full stop.
    """
    tokenizer = real_tokenizer("qwen3")
    messages = [
        system("Be brief."),
        user("Weather?"),
        assistant("Let me see.", reasoning_content="why", tool_calls=[call("weather", {"city": "Paris"})]),
        tool("3"),
        tool("4"),
        assistant(None, tool_calls=[call("weather", {"city": "Paris"})]),
        tool("5"),
        assistant("5 degrees."),
    ]
    tokens = ChatRenderer(tokenizer)(messages, TOOLS)
    assert contents(tokenizer, tokens) == [
        *("Be brief.\n\n", "Weather?", f"{THOUGHT}Let me see.\n{CALL}", "3", "4", CALL, "5", "5 degrees."),
    ]
    assert turns(tokenizer, tokens) == [
        *(f"{THOUGHT}Let me see.\n{CALL}<|im_end|>", f"{CALL}<|im_end|>", f"{EMPTY_THOUGHT}5 degrees.<|im_end|>"),
    ]
    assert "Be brief.\n\n# Tools" in decoded(tokenizer, tokens.ids)


@pytest.mark.tokenizers
def test_a_result_as_a_user_turn() -> None:
    """Bug: a mark in place of the content changes other turns, since Qwen recognises such a turn by its content."""
    tokenizer = real_tokenizer("qwen3")
    result = "<tool_response>\n3\n</tool_response>"
    tokens = ChatRenderer(tokenizer)([user("Weather?"), assistant(THOUGHT + CALL), user(result), assistant("3")])
    assert contents(tokenizer, tokens) == ["Weather?", THOUGHT + CALL, result, "3"]
    assert turns(tokenizer, tokens) == [f"{THOUGHT}{CALL}<|im_end|>", f"{EMPTY_THOUGHT}3<|im_end|>"]


def test_text_parts_and_no_content() -> None:
    tokenizer = small_chat("trimmed")
    parts = [{"type": "text", "text": "The "}, {"type": "text", "text": "fox"}]
    tokens = ChatRenderer(tokenizer)([{"role": "user", "content": parts}, {"role": "assistant"}, user("so")])
    assert contents(tokenizer, tokens) == ["The fox", "", "so"]
    assert turns(tokenizer, tokens) == ["<|eot_id|>"]


def test_a_turn_without_an_end() -> None:
    """Bug: the end is searched in the next turn, and the mask covers the user's words.

    Without a generation prompt the model also writes its turn's header.
    """
    template = "{% for m in messages %}{{ m.role + ':' + m.content + '\n' }}{% endfor %}"
    messages = [user("a"), assistant("b"), user("c"), assistant("d")]
    tokenizer = with_template(byte_level(), template + "{{ eos_token }}")
    assert turns(tokenizer, ChatRenderer(tokenizer)(messages)) == ["assistant:b", "assistant:d\n<|eot_id|>"]
    tokenizer = with_template(byte_level(), template + "{{ 'assistant:' if add_generation_prompt else eos_token }}")
    assert turns(tokenizer, ChatRenderer(tokenizer)(messages)) == ["b", "d\n<|eot_id|>"]


def test_calls_with_an_end_of_their_own() -> None:
    """Bugs: a call's own end, like Llama's `<|eom_id|>`, is outside the mask, or inside the content."""
    template = """{% for m in messages -%}
    {{ '[' + m.role + ']\n' }}{{ m.tool_calls | tojson + '<|end|>' if m.tool_calls else m.content + '<|eot_id|>' }}
    {%- endfor %}{{ '[assistant]\n' if add_generation_prompt }}"""
    tokenizer = with_template(byte_level(extra=("<|end|>",)), template)
    tokens = ChatRenderer(tokenizer)([user("a"), assistant("", tool_calls=[call("f", {"x": 1})]), assistant("b")])
    written = '[{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]'
    assert contents(tokenizer, tokens) == ["a", written, "b"]
    assert turns(tokenizer, tokens) == [f"{written}<|end|>", "b<|eot_id|>"]


def test_offsets_without_spaces() -> None:
    """Bug: a content loses its last space, as offsets of some byte-level tokenizers exclude spaces."""
    tokenizer = with_template(byte_level(), TRIMMED.replace(" | trim", ""))
    tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    assert isinstance(tokenizer.backend_tokenizer.pre_tokenizer, pre_tokenizers.Sequence)
    tokens = ChatRenderer(tokenizer)([user("  the fox  "), assistant(" the dog ")])
    assert contents(tokenizer, tokens)[1] == " the dog "
    assert contents(tokenizer, tokens)[0].endswith("the fox  ")


def test_pickled_for_a_loader_worker() -> None:
    render = ChatRenderer(small_chat("trimmed"))
    messages = [user("The fox"), assistant("The dog")]
    tokens, again = render(messages), pickle.loads(pickle.dumps(render))(messages)
    assert tokens.ids.tolist() == again.ids.tolist()
    assert tokens.assistant_mask.tolist() == again.assistant_mask.tolist()
    assert (tokens.ids.dtype, tokens.assistant_mask.dtype, tokens.spans.dtype) == (np.int32, np.bool_, np.int32)


@pytest.mark.tokenizers
def test_no_template() -> None:
    with pytest.raises(AlignmentError, match=r"has no chat template.*instruct"):
        ChatRenderer(real_tokenizer("gpt4o"))


def test_variables_that_rendering_sets() -> None:
    with pytest.raises(AlignmentError, match="template_kwargs sets tokenize"):
        ChatRenderer(small_chat("trimmed"), template_kwargs={"tokenize": True})


@pytest.mark.tokenizers
def test_a_template_that_refuses() -> None:
    """Bug: the error names the last message and not the first that the template refuses."""
    messages = [user("a"), assistant("b"), assistant("c"), user("d"), assistant("e")]
    with pytest.raises(AlignmentError, match=r"refuses messages\[2\] \(role 'assistant'.*must alternate.*drop"):
        ChatRenderer(real_tokenizer("gemma3"))(messages)


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "without messages"),
        ("Hi", "must be a list of messages"),
        ({"role": "user", "content": "Hi"}, "must be a list of messages"),
        (["Hi"], r"messages\[0\] is 'Hi', which is not a mapping with a role"),
        ([user("a"), {"role": "assisstant", "content": "b"}], r"messages\[1\] has .* 'assisstant'; write 'assistant'"),
        ([{"role": "human", "content": "a"}], r"messages\[0\] has the role 'human'; write 'user'"),
        ([user("a"), {"role": "Assistant", "content": "b"}], "write 'assistant'"),
        ([user("a"), {"content": "Hi"}], r"messages\[1\] is .* not a mapping with a role"),
        ([user("a"), {"role": "tool", "content": {"t": 3}}], r"messages\[1\].content is \{'t': 3\}"),
        ([{"role": "user", "content": [{"type": "image"}]}], r"messages\[0\].content has a part of type 'image'"),
        ([user("a"), {"role": "user", "content": [{"type": "image_url", "text": ""}]}], r"messages\[1\].*'image_url'"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content is .*text"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content is 3; it must be a string"),
    ],
)
def test_malformed_messages(messages: Any, reason: str) -> None:
    with pytest.raises(AlignmentError, match=reason):
        ChatRenderer(small_chat("trimmed"))(messages)
