"""Contents in rendered strings, under templates that do to messages what templates do."""

import json
from collections.abc import Sequence

from nemo_opd.alignment.chat_spans import Message, Render, common_prefix, locate_contents
from tests.alignment.chat_fixture import assistant, call, tool, user


def contents(render: Render, messages: Sequence[Message]) -> list[str | None]:
    text = render(messages)
    assert text is not None
    spans = locate_contents(render, messages, text)
    edges = [edge for span in spans if span for edge in (span.start, span.stop)]
    assert edges == sorted(edges)
    return [None if span is None else text[span.start : span.stop] for span in spans]


def plain(messages: Sequence[Message]) -> str:
    return "".join(f"<{message['role']}>\n{message['content'].strip()}</>\n" for message in messages)


def test_trimmed_contents_that_look_like_the_template() -> None:
    """Catches a search: every content occurs earlier in the string."""
    messages = [user("user>\n"), assistant("</>\n<user>\nuser>"), user(" > "), assistant("</>"), user("")]
    assert contents(plain, messages) == ["user>", "</>\n<user>\nuser>", ">", "</>", ""]


def test_long_conversations_take_three_renders() -> None:
    """Catches a render a message, which is quadratic: 100 messages took 0.1-0.4 s."""
    calls = []

    def counted(messages: Sequence[Message]) -> str:
        calls.append(len(messages))
        return plain(messages)

    messages = [user("Hi") if k % 2 == 0 else assistant(f"{k}", tool_calls=[call("f", {})]) for k in range(100)]
    text = plain(messages)
    assert None not in locate_contents(counted, messages, text)
    assert len(calls) == 3


def test_quoted_contents() -> None:
    """A span covers what became of the content inside the quotes."""

    def quoting(messages: Sequence[Message]) -> str:
        return "".join(f"[{json.dumps(message['content'], ensure_ascii=False)}]" for message in messages)

    assert contents(quoting, [tool('a "b"\n'), tool("é")]) == ['a \\"b\\"\\n', "é"]


def with_calls(messages: Sequence[Message]) -> str | None:
    """Refuses a tool's answer without a call, as several published templates do; drops the content beside a call."""
    text, called = "", False
    for message in messages:
        if message["role"] == "tool" and not called:
            return None
        called = bool(message.get("tool_calls")) or (called and message["role"] == "tool")
        written = json.dumps(message["tool_calls"]) if message.get("tool_calls") else message["content"]
        text += f"<{message['role']}>{written}</>"
    return text


def test_a_template_that_refuses_answers_without_calls() -> None:
    """The call's arguments stand for its message; the others are found as they are."""
    messages = [user("Hi"), assistant("", tool_calls=[call("f", {"x": 1})]), tool("7"), assistant("7")]
    found = contents(with_calls, messages)
    assert (found[0], *found[2:]) == ("Hi", "7", "7")
    assert found[1] is not None
    assert 'x": 1' in found[1]
    assert "</>" not in found[1]


def test_a_message_that_is_not_rendered() -> None:
    def last_two(messages: Sequence[Message]) -> str:
        return plain(messages[-2:])

    assert contents(last_two, [user("a"), assistant("b"), user("c")]) == [None, "b", "c"]


def test_a_content_that_changes_the_template_elsewhere() -> None:
    """The span is narrowed to the content, and ends before the next one starts."""

    def counting(messages: Sequence[Message]) -> str:
        questions = sum(message["role"] == "user" and not message["content"].startswith("=") for message in messages)
        return "".join(f"<{message['role']} of {questions}>{message['content']}</>" for message in messages)

    assert contents(counting, [user("why"), assistant("so"), user("= 3"), assistant("ok")])[2:] == ["= 3", "ok"]


def test_common_prefix() -> None:
    for a, b in (("", ""), ("a", ""), ("abc", "abd"), ("abc", "abc"), ("xbc", "abc"), ("abcdef", "abc")):
        expected = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
        assert common_prefix(a, b) == expected
