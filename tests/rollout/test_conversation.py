"""Tokens of collected conversations against the template's rendering of the entire conversation."""

from typing import Any

import pytest

from nemo_opd.data.row_types import Message, Prompt
from nemo_opd.errors import AlignmentError, DataError, RolloutError
from nemo_opd.rollout.conversation import ConversationRenderer
from tests.rollout.scripted import asking, encoded
from tests.rollout.templates import talking
from tests.tokenizers_fixture import byte_level, real_tokenizer

TOOL = {"type": "function", "function": {"name": "clock", "description": "Time.", "parameters": {"type": "object"}}}
THINKING = "<think>\nhm\n</think>\n\n"
CASES = {
    "qwen3": ("qwen3", "tool", {}, THINKING),
    "qwen3_users": ("qwen3", "user", {"enable_thinking": False}, ""),
    "llama3_1": ("llama3_1", "tool", {}, ""),
    "gemma3": ("gemma3", "user", {}, ""),
    "tagged": ("tagged", "tool", {}, ""),
    "without_ends": ("without_ends", "user", {}, ""),
}
END = {"qwen3": "<|im_end|>", "llama3_1": "<|eot_id|>", "gemma3": "<end_of_turn>", "tagged": "<|im_end|>"}


def tokenizer_of(name: str) -> Any:
    return real_tokenizer(name) if name in ("qwen3", "llama3_1", "gemma3") else talking(name)


@pytest.mark.tokenizers
@pytest.mark.parametrize("case", CASES)
def test_prompt_turns_and_messages_between_make_up_the_conversation(case: str) -> None:
    """Bugs: a token of the template is missing or occurs twice; the student's tokens are tokenized again."""
    name, role, kwargs, thinking = CASES[case]
    tokenizer = tokenizer_of(name)
    renderer = ConversationRenderer(tokenizer, kwargs)
    tools = [TOOL] if role == "tool" else None
    messages: list[Message] = [{"role": "user", "content": "What is 12 + 7?  Größe"}]
    ids = renderer.prompt_ids(Prompt(0, list(messages), tools=tools)).tolist()
    end = encoded(tokenizer, END[name]) if name in END else []
    for turn, answers in (("Let me see.", ["19"]), ("And 東京?", ["a b", " x\n"][: 1 + (role == "tool")]), ("7!", [])):
        ids += [*encoded(tokenizer, thinking + turn), *end]
        messages.append({"role": "assistant", "content": thinking + turn})
        new = [{"role": role, "content": answer} for answer in answers]
        if new:
            ids += renderer.between(messages, new, tools).tolist()
            messages += new
    kwargs = kwargs if name == "qwen3" and role == "tool" else {}
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **kwargs)
    if case == "qwen3_users":
        # Earlier turns do not repeat the empty thinking that the generation prompt has; sampled tokens stay.
        text, ids_text = text.replace("<think>\n\n</think>\n\n", ""), tokenizer.decode(ids)
        assert ids_text.replace("<think>\n\n</think>\n\n", "") == text.rstrip("\n")
        return
    expected = encoded(tokenizer, text)
    assert ids == expected[: len(ids)]
    assert not tokenizer.decode(expected[len(ids) :]).strip()


def test_a_tool_that_may_only_answer_a_call() -> None:
    """Bug: the call is rendered as text, which the template rejects."""
    tokenizer = talking("strict")
    renderer = ConversationRenderer(tokenizer)
    call = {"type": "function", "function": {"name": "clock", "arguments": {"zone": "UTC"}}}
    answer = [{"role": "tool", "content": "noon"}]
    for calls in ([call], [{"type": "malformed", "text": "{", "error": "no JSON"}]):
        messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "{…", "tool_calls": calls}]
        between = renderer.between(messages, answer, [TOOL])
        assert tokenizer.decode(between) == "[tool]\nnoon<|eot_id|>[assistant]\n"


def test_special_tokens_in_an_answer_do_not_end_the_turn() -> None:
    renderer = ConversationRenderer(talking("without_ends"))
    messages = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "hm"}]
    between = renderer.between(messages, [{"role": "user", "content": "a<|im_end|>b\U000f0000"}], None)
    assert talking("without_ends").decode(between) == "\nuser: a<|im_end|>b\U000f0000\nassistant: "


@pytest.mark.tokenizers
def test_template_variables_and_tools_reach_the_prompt() -> None:
    tokenizer = real_tokenizer("qwen3")
    renderer = ConversationRenderer(tokenizer, {"enable_thinking": False})
    text = tokenizer.decode(renderer.prompt_ids(asking("Hi", tools=[TOOL])))
    assert text.endswith("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert '"name": "clock"' in text
    assert renderer.shows_tools([TOOL])
    assert not ConversationRenderer(real_tokenizer("llama3_1")).shows_tools([TOOL])


@pytest.mark.tokenizers
@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "tagged"])
def test_a_dataset_response_equals_the_templates(name: str) -> None:
    tokenizer = tokenizer_of(name)
    prompt = asking("Hi", response="The fox.")
    continued = ConversationRenderer(tokenizer).continued(prompt)
    messages = [*prompt.content, {"role": "assistant", "content": "The fox."}]
    assert continued.ids.tolist() == encoded(
        tokenizer, tokenizer.apply_chat_template(messages, tokenize=False).rstrip()
    )
    assert continued.ids[: continued.start].tolist() == ConversationRenderer(tokenizer).prompt_ids(prompt).tolist()
    text = tokenizer.decode(continued.ids[continued.start :])
    assert text == "<think>\n\n</think>\n\n" * (name == "qwen3") + "The fox." + END[name]
    assert continued.is_ended


def test_a_templates_refusal_names_the_row() -> None:
    renderer = ConversationRenderer(talking("alternating"))
    with pytest.raises(DataError, match=r"prompt 5 .* refuses it: .*alternate"):
        renderer.prompt_ids(Prompt(5, [{"role": "user", "content": "a"}] * 2))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    with pytest.raises(RolloutError, match=r"\(role tool\) after 2 messages: .*alternate"):
        renderer.between(messages, [{"role": "tool", "content": "c"}], None)
    with pytest.raises(DataError, match=r"prompt 3 .* no response"):
        renderer.continued(asking("a"))
    with pytest.raises(AlignmentError, match="no chat template"):
        ConversationRenderer(byte_level())
