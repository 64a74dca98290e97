"""Pieces of conversations that templates omit, for small templates and for TRL's."""

from pathlib import Path
from typing import Any

import pytest
import trl

from nemo_opd.alignment.chat_render import missing_opening_tag, omitted_pieces
from nemo_opd.alignment.chat_template import ChatTemplate, plain_messages
from tests.alignment.chat_fixture import assistant, system, user, with_template
from tests.tokenizers_fixture import byte_level

CALL = {"type": "function", "function": {"name": "forecast", "arguments": '{"place": "Bern", "days": 3}'}}
TALK = [
    system("Be brief."),
    user("Weather?"),
    assistant("Let me see.", tool_calls=[CALL], reasoning_content="Earlier thought."),
    {"role": "tool", "name": "forecast", "content": "rain"},
    assistant("It rains.", reasoning="Later thought.", thinking="Later thought."),
]
ALL = (
    "{% for m in messages %}<{{ m.role }}>{{ m.reasoning_content }}{{ m.content }}"
    "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}<end>{% endfor %}"
)
TEMPLATES = sorted(path.stem for path in (Path(trl.__file__).parent / "chat_templates").glob("*.jinja"))


def written_if(condition: str) -> str:
    """Return a template that writes contents only in this case."""
    return ALL.replace(
        "{{ m.content }}", "{% if CONDITION %}{{ m.content }}{% endif %}".replace("CONDITION", condition)
    )


def omitted(template: str, messages: list[dict[str, Any]]) -> dict[int, set[str]]:
    chat = ChatTemplate(with_template(byte_level(), template), {})
    return {k: set(pieces) for k, pieces in enumerate(omitted_pieces(chat, plain_messages(messages))) if pieces}


@pytest.mark.parametrize(
    ("template", "pieces"),
    [
        (ALL, {}),
        (ALL.replace("{{ c.function.name }}", ""), {2: {"tool calls"}}),
        (ALL.replace("{{ c.function.arguments | tojson }}", ""), {2: {"tool calls"}}),
        (written_if("not m.tool_calls"), {2: {"what the assistant says beside a call"}}),
        (ALL.replace("{{ m.reasoning_content }}", ""), {4: {"the reasoning of the last message"}}),
        (written_if("m.role != 'tool'"), {3: {"tools' results"}}),
        (ALL.replace("in messages", "in messages[1:]"), {0: {"system messages"}}),
        (ALL.replace("in messages", "in messages if m.role != 'user'"), {1: {"what the user says"}}),
        (written_if("loop.index < 5"), {4: {"what the assistant says"}}),
    ],
)
def test_each_kind_of_piece(template: str, pieces: dict[int, set[str]]) -> None:
    """Bugs: a dropped piece is not reported; a text that occurs twice hides that one of them is dropped."""
    assert omitted(template, TALK) == pieces


def test_keys_that_few_templates_read() -> None:
    """Bug: the student learns an empty turn in place of a refusal, or of a call in an older format."""
    older = {"role": "assistant", "content": None, "function_call": CALL["function"]}
    refusal = {"role": "assistant", "content": None, "refusal": "I cannot."}
    assert omitted(ALL, [user("Hi"), older]) == {1: {"tool calls"}}
    assert omitted(ALL, [user("Hi"), refusal]) == {1: {"what the assistant says"}}


def test_a_template_that_refuses_other_words_is_asked_message_by_message() -> None:
    """Bug: omissions are not found if the template refuses changes of one message."""
    template = ALL.replace("<end>", "{% if loop.first and m.content != 'Be brief.' %}{{ 1 / 0 }}{% endif %}")
    assert omitted(template.replace("{{ m.reasoning_content }}", ""), TALK) == {
        4: {"the reasoning of the last message"}
    }


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_texts_of_pieces_are_there_or_reported(name: str) -> None:
    """Bug: a piece that the template writes is reported as omitted, or the reverse."""
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    chat = ChatTemplate(with_template(byte_level(), template), {"bos_token": "<s>"})
    call = {"id": "abcdefgh1", **CALL}
    cases: list[tuple[str, str, list[dict[str, Any]]]] = [
        ("tool calls", "forecast", [user("Hi"), assistant(None, tool_calls=[call])]),
        ("what the user says", "Weather", [user("Weather"), assistant("Yes")]),
        ("what the assistant says", "Sunny", [user("Weather"), assistant("Sunny")]),
        ("system messages", "Briefly", [system("Briefly"), user("Hi"), assistant("Yes")]),
        ("the reasoning of the last message", "Pondering", [user("Hi"), assistant("Yes", thinking="Pondering")]),
    ]
    for piece, text, messages in cases:
        plain = plain_messages(messages)
        try:
            rendered = chat.render(plain)
        except Exception:
            continue
        assert (piece in set().union(*omitted_pieces(chat, plain))) == (text not in rendered), piece


@pytest.mark.parametrize(
    ("prompt", "turn", "tag"),
    [
        ("<think>\n", "", "<think>"),
        ("<think>\n", "<think>\n\n</think>", None),
        ("<think>\n\n</think>\n\n", "", None),
        ("", "", None),
        ("[THINK]", "", "[THINK]"),
        ("<|START_THINKING|>", "", "<|START_THINKING|>"),
    ],
)
def test_prompts_that_end_in_a_tag_of_thinking(prompt: str, turn: str, tag: str | None) -> None:
    """Bug: the student learns to answer at once, but the prompt opens a thinking block."""
    body = "<{{ m.role }}>{% if m.role == 'assistant' %}" + turn + "{% endif %}{{ m.content }}<end>"
    template = "{% for m in messages %}" + body + "{% endfor %}"
    template += "{% if add_generation_prompt %}<assistant>" + prompt + "{% endif %}"
    chat = ChatTemplate(with_template(byte_level(), template), {})
    assert missing_opening_tag(chat, plain_messages([user("Hi"), assistant("Yes")])) == tag
    assert missing_opening_tag(chat, plain_messages([user("Hi")])) is None
