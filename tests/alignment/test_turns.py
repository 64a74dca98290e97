"""A conversation's learned tokens are those that the model writes, for templates with the structure of public ones."""

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken

from nemo_opd.alignment import ChatRenderer
from nemo_opd.alignment.chat_turns import TurnTokens, locate_messages
from nemo_opd.errors import AlignmentError
from tests.alignment.chat_fixture import assistant, call, system, tool, user
from tests.alignment.chat_templates import (
    PLAIN,
    REWRITING,
    TEMPLATES,
    TOOL,
    WEATHER,
    chat_tokenizer,
    render,
    tokenizer_of,
)

THOUGHT = [*PLAIN[:3], assistant("Answer two.", thinking="Hm.")]
TURNS = {
    "closing text": (
        PLAIN,
        [
            "Answer one.<|close|>assistant<|sep|><|end_of_msg|>",
            "Answer two.<|close|>assistant<|sep|><|end_of_msg|>",
        ],
    ),
    "two closing tokens": (PLAIN[:2], ["Answer one.<|end_response|><|e|>"]),
    "answer in the turn": (TOOL, ['<|call|>weather{"city": "Bern"}<|/call|>', "It is sunny.<|e|>"]),
    "answer with the call's name": (TOOL, ['<|call|>weather{"city": "Bern"}<|e|>', "It is sunny.<|e|>"]),
    "no generation prompt": (TOOL, ['[TOOL_CALLS]weather[ARGS]{"city": "Bern"}</s>', "It is sunny.</s>"]),
    "no end": (PLAIN[:2], ["Answer one."]),
    "channels": (
        THOUGHT,
        [
            "<|channel|>final<|message|>Answer one.<|end|>",
            "<|channel|>analysis<|message|>Hm.<|end|>"
            "<|start|>assistant<|channel|>final<|message|>Answer two.<|return|>",
        ],
    ),
    "thinking": (THOUGHT, ["Answer one.<|e|>", "Hm.\n</think>\n\nAnswer two.<|e|>"]),
}
WORDS = ("yes", "no", "Bern", "assistant", "<think>", "</think>", "<b>x</b>", " ", "\n", "{", "🦊", "é", "東京")
CONTENTS = st.lists(st.sampled_from(WORDS), max_size=4).map("".join)


def turns_of(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    rendered = ChatRenderer(tokenizer).render(messages)
    return ["".join(rendered.text[slice(*span)] for span in turn.spans) for turn in rendered.turns.values()]


@pytest.mark.parametrize("name", TEMPLATES)
def test_turns(name: str) -> None:
    """Bug: tools' answers and headers are learned; calls and ends of turns are not."""
    messages, expected = TURNS[name]
    assert turns_of(chat_tokenizer(name), messages) == expected


def test_a_conversation_that_begins_with_the_assistant() -> None:
    """Bug: the turn's start is not found, as no messages come before it."""
    messages = [assistant("Hello."), user("Hi."), assistant("Bye.")]
    assert turns_of(chat_tokenizer("two closing tokens"), messages)[0] == "Hello.<|end_response|><|e|>"


@st.composite
def conversations(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return conversations with empty, repeated and Unicode contents, thinking, and calls with various arguments."""
    messages: list[dict[str, Any]] = []
    for _ in range(draw(st.integers(1, 4))):
        messages.append(user(draw(CONTENTS)))
        for _ in range(draw(st.integers(0, 2))):
            arguments = draw(st.dictionaries(st.sampled_from(("a", "b")), CONTENTS | st.integers(0, 9), max_size=2))
            messages.append(assistant(draw(CONTENTS), tool_calls=[call("look", arguments)]))
            messages.append({**tool(draw(CONTENTS)), "name": "look"})
        thinking = {"thinking": draw(CONTENTS)} if draw(st.booleans()) else {}
        messages.append(assistant(draw(CONTENTS), **thinking))
    return messages


@pytest.mark.parametrize("name", [name for name in TEMPLATES if name not in REWRITING])
@settings(max_examples=15)
@given(messages=conversations())
def test_turns_by_definition(name: str, messages: list[dict[str, Any]]) -> None:
    """Catches a turn that differs from its definition: the text that an answer adds to its prompt."""
    tokenizer = chat_tokenizer(name)
    rendered = ChatRenderer(tokenizer).render(messages)
    is_written = [False] * len(rendered.text)
    for turn in rendered.turns.values():
        for start, stop in turn.spans:
            is_written[start:stop] = [True] * (stop - start)
    expected = [False] * len(rendered.text)
    for k, message in enumerate(messages):
        if message["role"] == "assistant":
            prompt, with_answer = render(tokenizer, messages[:k], True), render(tokenizer, messages[: k + 1])
            assert rendered.text.startswith(prompt)
            assert rendered.text.startswith(with_answer)
            expected[len(prompt) : len(with_answer)] = [True] * (len(with_answer) - len(prompt))
    assert is_written == expected


@pytest.mark.parametrize("name", REWRITING)
@settings(max_examples=15)
@given(messages=conversations())
def test_no_other_text_is_learned(name: str, messages: list[dict[str, Any]]) -> None:
    """Bugs: a user's or a tool's words are learned; the last turn is not learned in full."""
    for k, message in enumerate(messages):
        if message["role"] in ("user", "tool"):
            message["content"] += f"word{k}"
    tokenizer = chat_tokenizer(name)
    turns = turns_of(tokenizer, messages)
    assert "word" not in "".join(turns)
    assert len(turns) == sum(message["role"] == "assistant" for message in messages)
    prompt, text = render(tokenizer, messages[:-1], True), render(tokenizer, messages)
    if text.startswith(prompt):
        assert turns[-1] == text[len(prompt) :].rstrip("\n")


def test_a_moved_system_message() -> None:
    """Bug: the user's question is learned if a template moves system messages to the front (DeepSeek)."""
    template = (
        "{% for m in messages if m.role == 'system' %}{{ m.content }}{% endfor %}{% for m in messages %}"
        "{% if m.role == 'user' %}<|u|>{{ m.content }}{% elif m.role == 'assistant' %}<|a|>{{ m.content }}</s>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    messages = [*PLAIN[:2], system("Be brief."), *PLAIN[2:]]
    assert turns_of(tokenizer_of(template, "</s>"), messages) == ["Answer one.</s>", "Answer two.</s>"]


def test_joined_answers() -> None:
    """Bug: after one turn without an end, which two messages share, no turn's end is learned."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|u|>{{ m.content }}{% else %}"
        "{{ '' if loop.index0 and messages[loop.index0 - 1].role == 'assistant' else '<|a|>' }}{{ m.content }}"
        "{{ '' if not loop.last and messages[loop.index0 + 1].role == 'assistant' else '</s>' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    messages = [user("a"), assistant("b"), assistant("c"), user("d"), assistant("e"), user("f"), assistant("g")]
    assert turns_of(tokenizer_of(template, "</s>"), messages) == ["b", "c</s>", "e</s>", "g</s>"]


def test_a_result_that_cannot_be_marked() -> None:
    """Bug: a result between a call and the answer is learned."""
    template = (
        "{% for m in messages %}{% if m.role == 'user' %}<|u|>{{ m.content }}{% elif m.role == 'assistant' %}<|a|>"
        "{% for c in m.tool_calls or [] %}<|call|>{{ c.function.arguments.city }}<|/call|>{% endfor %}"
        "{% for t in messages[loop.index0 + 1:loop.index0 + 2] if t.role == 'tool' %}"
        "<|result|>{{ 'JSON ' if t.content.startswith('{') else '' }}{{ t.content }}<|/result|>{% endfor %}"
        "{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    messages = [user("Weather?"), assistant("It is 3.", tool_calls=[WEATHER]), tool('{"t": 3}')]
    (turn,) = turns_of(tokenizer_of(template, "</s>"), [*messages])
    assert turn == "<|call|>Bern<|/call|>It is 3.</s>"


def test_a_result_that_quotes_its_call() -> None:
    """Bug: the header of a tool's message is learned if it repeats the call's arguments."""
    template = (
        "{% set seen = namespace(city='') %}{% for m in messages %}{% if m.role == 'tool' %}<|t|>of {{ seen.city }}: "
        "{{ m.content }}</s>{% elif m.role == 'assistant' %}<|a|>{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% set seen.city = c.function.arguments.city %}<|call|>{{ seen.city }}{% endfor %}</s>{% else %}<|u|>"
        "{{ m.content }}</s>{% endif %}{% endfor %}{% if add_generation_prompt %}<|a|>{% endif %}"
    )
    assert turns_of(tokenizer_of(template, "</s>"), TOOL) == ["<|call|>Bern</s>", "It is sunny.</s>"]


def test_a_call_whose_function_is_text() -> None:
    """Bug: a TypeError for a call whose function is only a name."""
    messages = [user("a"), assistant("b", tool_calls=[{"function": "f", "arguments": {"x": "1"}}])]
    assert turns_of(chat_tokenizer("closing text"), messages) == ["b<|close|>assistant<|sep|><|end_of_msg|>"]


def test_few_renderings_of_a_long_conversation() -> None:
    """Bug: one rendering for each message. 160 messages may take the characters of 2.5 full renderings."""
    messages = [user("Go.")]
    for i in range(80):
        messages += [assistant("", tool_calls=[call("f", {"x": f"argument {i}", "n": i})]), tool(f"result {i}\n")]
    tokenizer = chat_tokenizer("no generation prompt")
    text = render(tokenizer, messages)
    num_characters = 0

    def counted(part: Any, prompt: bool) -> str | None:
        nonlocal num_characters
        rendered = render(tokenizer, part, prompt)
        num_characters += len(rendered)
        return rendered

    added = [token.content for token in tokenizer.added_tokens_decoder.values()]
    _, turns = locate_messages(counted, messages, text, TurnTokens.of(added, ["</s>"]))
    assert len(turns) == 80
    assert num_characters < 2.5 * len(text)


@pytest.mark.parametrize("answer", ["Yes.", "    return 1\n", "\nYes."])
def test_a_header_that_takes_white_space(answer: str) -> None:
    """Bug: a header's token with `rstrip` is learned because it includes the answer's leading white space."""
    template = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}" + (
        "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
    )
    tokenizer = tokenizer_of(template, "<|end|>")
    marks = [AddedToken(f"<|{role}|>", special=True, normalized=False, rstrip=True) for role in ("user", "assistant")]
    tokenizer.add_tokens(marks)
    chat = ChatRenderer(tokenizer)([user("Hi"), assistant(answer)])
    learned = tokenizer.convert_ids_to_tokens(chat.ids[chat.assistant_mask])
    assert "<|assistant|>" not in learned
    assert learned[-1] == "<|end|>"


def contents_of(template: str, messages: list[dict[str, Any]]) -> list[str | None]:
    rendered = ChatRenderer(tokenizer_of(template, "</s>")).render(messages)
    return [None if span is None else rendered.text[slice(*span)] for span in rendered.contents]


def test_contents_that_look_like_the_template() -> None:
    """Bug: contents are found by search, but each occurs earlier in the text."""
    template = "{% for m in messages %}<{{ m.role }}>\n{{ m.content | trim }}</>\n{% endfor %}"
    messages = [user("user>\n"), assistant("</>\n<user>\nuser>"), user(" > "), assistant("</>"), user("")]
    contents = contents_of(template, messages)
    assert (contents[0], contents[2], contents[4]) == ("user>", ">", "")


def test_quoted_contents() -> None:
    """Bug: the span of an escaped content is lost, or includes escaped white space at its ends."""
    template = "{% for m in messages %}[{{ m.content | tojson }}]{% endfor %}"
    assert contents_of(template, [tool('a "b"\n'), tool("é")]) == ['a \\"b\\"', "é"]


def test_a_message_that_is_not_rendered() -> None:
    template = "{% for m in messages[-2:] %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    assert contents_of(template, [user("a"), assistant("b"), user("c")])[0] is None


def test_a_content_that_the_template_compares() -> None:
    """Bug: a content is lost because a mark in its place changes the text elsewhere."""
    template = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content[:1] != '=' %}{% set ns.n = ns.n + 1 %}"
        "{% endif %}{% endfor %}{% for m in messages %}<{{ m.role }} of {{ ns.n }}>{{ m.content }}</s>{% endfor %}"
    )
    assert contents_of(template, [user("why"), assistant("so"), user("= 3"), system("ok")])[2:] == ["= 3", "ok"]


def test_more_messages_than_marks() -> None:
    messages = [user("a")] * 50_000
    with pytest.raises(AlignmentError, match=r"50,000 messages is too long; split"):
        locate_messages(lambda part, prompt: "", messages, "", TurnTokens.of((), ()))


TRL = Path(pytest.importorskip("trl").__file__).parent / "chat_templates"
PUBLIC = sorted(path.stem for path in TRL.glob("*.jinja") if "training" not in path.stem)
ENDS = (
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<turn|>", "<|end|>", "<|return|>", "<|eot|>"),
    *("<|END_OF_TURN_TOKEN|>", "<｜end▁of▁sentence｜>", "</s>"),
)
MARKS = re.compile(
    r"<[|｜][^<>\s'\"{}]+[|｜]>|<\|?(?:start_of_turn|end_of_turn|turn|tool_call|tool_response|channel|tool)\|?>"
    r"|</?(?:s|think|tool_call|tool_response|bos|eos)>|\[/?(?:INST|TOOL_CALLS|ARGS|TOOL_RESULTS)\]"
)


@pytest.mark.parametrize("name", PUBLIC)
def test_public_templates(name: str) -> None:
    """Bugs in TRL's copies of public templates: a user's or a tool's words are learned; a turn differs from its
    definition (checked if the template writes the beginnings unchanged)."""
    template = (TRL / f"{name}.jinja").read_text(encoding="utf-8")
    tokens = tuple(set(MARKS.findall(template)))
    eos = [end for end in ENDS if end in tokens]
    tokenizer = tokenizer_of(template, eos[-1] if eos else "<|endoftext|>", tokens)
    tokenizer.bos_token = "<|begin_of_text|>"
    weather = {**call("weather", {"city": "Bern"}), "id": "call00001"}
    now = {**call("time", {}), "id": "call00001"}  # no value for a mark
    answer = {**tool("sunny"), "name": "weather", "tool_call_id": "call00001"}
    called = [TOOL[0], assistant("", tool_calls=[weather]), answer, assistant("It is said."), *PLAIN]
    bare = [TOOL[0], assistant(None, tool_calls=[now]), {**answer, "name": "time"}, assistant("It is said.")]
    refused = 0
    for messages in (PLAIN, [*PLAIN[:3], assistant("Answer two.", reasoning_content="Hm.")], called, bare):
        try:
            renderer = ChatRenderer(tokenizer)
            rendered = renderer.render(messages)
        except AlignmentError:
            refused += 1
            continue
        for k, turn in rendered.turns.items():
            learned = "".join(rendered.text[slice(*span)] for span in turn.spans)
            assert not any(word in learned for word in ("sunny", "One?", "Two?", "Weather?"))
            prompt = renderer.template.render(messages[:k], add_generation_prompt=True)
            with_answer = renderer.template.render(messages[: k + 1])
            if rendered.text.startswith(prompt) and rendered.text.startswith(with_answer):
                assert "time" not in with_answer[len(prompt) :] or "time" in learned
                assert turn.spans[0].start == len(prompt)
                closing = rendered.text[turn.spans[-1].stop : len(with_answer)]
                assert not closing.strip() or closing.strip() == tokenizer.eos_token  # Phi-3 writes EOS after all
    assert refused <= 2
