"""Preflight's warnings about parts of conversations that chat templates omit, and about turns that are not learned."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from nemo_opd.config import RunConfig
from nemo_opd.errors import DataError
from nemo_opd.preflight.plan import preflight
from tests.composition import compose
from tests.tiny import Tiny

HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
CALLS = "{% for c in m.tool_calls %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endfor %}"
END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
CALL = {"type": "function", "function": {"name": "jump", "arguments": '{"over": "the lazy dog"}'}}
THINKS = "{# the generation prompt begins a thought #}"

Check = Callable[..., tuple[str, ...]]


@pytest.fixture
def check(tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Check:
    """A function from template bodies of student and teacher, conversations and overrides to warnings."""
    monkeypatch.chdir(tmp_path)

    def warnings(student: str, teacher: str, chats: list[Any], *overrides: str, end: str = END) -> tuple[str, ...]:
        for name, body in (("student", student), ("teacher", teacher)):
            tail = end.replace("<|assistant|>", "<|assistant|><think>") if body == THINKS else end
            (tmp_path / f"{name}.jinja").write_text(HEAD + body + tail)
        (tmp_path / "chats.jsonl").write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
        config: RunConfig = compose(
            *tiny.overrides(
                "data.train.arrow_files=null",
                f"data.train.jsonl_files={tmp_path / 'chats.jsonl'}",
                "data.validation.arrow_files=null",
                "data.messages_key=messages",
                f"student.chat_template={tmp_path / 'student.jinja'}",
                f"teachers.0.chat_template={tmp_path / 'teacher.jinja'}",
                "train.max_length=128",
                "teachers.0.equal_history=none",
                *overrides,
                teachers=1,
            )
        )
        return tuple(warning for warning in preflight(config).warnings if warning.startswith("data.train: "))

    return warnings


def talk(**call: Any) -> list[dict[str, Any]]:
    return [
        {"role": "user", "content": "fox?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL], **call},
        {"role": "tool", "content": "jumped"},
        {"role": "assistant", "content": "The quick brown fox"},
    ]


PLAIN = [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "The quick brown fox"}]


def test_calls_that_would_not_be_learned_are_refused(check: Check) -> None:
    """Bug: the student learns to end its turn at once."""
    with pytest.raises(
        DataError, match=r"student's chat template leaves out tool calls in 2 of 3 .*in place of a call"
    ):
        check("", CALLS, [talk(), PLAIN, talk()])
    assert not check(CALLS, CALLS, [talk(), PLAIN, talk()])


@pytest.mark.parametrize(("call", "overrides"), [({"weight": 0}, ()), ({}, ("data.learned_turns=marked",))])
def test_calls_that_are_not_learned_are_a_warning(
    check: Check, call: dict[str, Any], overrides: tuple[str, ...]
) -> None:
    """Bug: the run is refused although the student only reads the calls, or no warning."""
    marked = [[*talk(**call)[:-1], {**PLAIN[-1], "weight": 1}] for _ in range(3)]
    (warning,) = check("", CALLS, marked, *overrides)
    assert warning.startswith("data.train: the chat template of student leaves out tool calls in 3 of 3 conversations")


def test_a_teacher_that_reads_less_is_a_warning(check: Check) -> None:
    """Bug: no word about a teacher that never sees the calls."""
    (warning,) = check(CALLS, "", [talk(), PLAIN, PLAIN])
    assert warning == (
        "data.train: the chat template of teachers.0 leaves out tool calls in 1 of 3 conversations checked, so this "
        "model does not read it; set teachers.0.chat_template to a file with a template that writes it, or leave it "
        "out of the data"
    )


def test_a_prompt_that_asks_for_thinking_is_a_warning(check: Check) -> None:
    """Bug: the student learns to answer at once, but its prompts end with <think>."""
    (warning,) = check(THINKS, "", [PLAIN] * 3)
    assert "ends the generation prompt with '<think>', but in 3 of 3 conversations" in warning


@pytest.mark.parametrize("content", ["", " \n", None])
def test_answers_without_text_are_a_warning(check: Check, content: str | None) -> None:
    """Catches a student that learns to end its turn at once, and a warning about a call or a message with weight=0."""
    empty = {**PLAIN[1], "content": content}
    (warning,) = check(CALLS, CALLS, [PLAIN, [PLAIN[0], empty], [PLAIN[0], {**empty, "weight": 0}, *PLAIN], talk()])
    assert warning.startswith("data.train: 1 of 4 conversations checked have an assistant message without text")


def test_conversations_without_a_learned_message_are_refused(check: Check) -> None:
    """Bug: a whole run learns nothing."""
    with pytest.raises(
        DataError, match=r"data\.learned_turns=marked selects none .* in 3 conversations: none has a mark"
    ):
        check("", "", [PLAIN] * 3, "data.learned_turns=marked")
    with pytest.raises(
        DataError, match=r"learned_turns=all selects none .*all are marked as not learned .*or remove the marks"
    ):
        check("", "", [[PLAIN[0], {**PLAIN[1], "train": False}]] * 3)
    with pytest.raises(DataError, match=r"line 2 of .*messages\[1\]\.weight is 0\.5; it must be 1 or true"):
        check("", "", [PLAIN, [PLAIN[0], {**PLAIN[1], "weight": 0.5}]])


def test_a_last_turn_without_an_end(check: Check) -> None:
    """Bug: no word about a template that does not end the last turn, so the student never learns to stop."""
    end = "{% if not loop.last %}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    chats = [[{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "The quick"}]] * 3
    (warning,) = check("{# plain #}", "{# plain #}", chats, end=end)
    assert "writes no token that ends the assistant's last turn in 3 of 3 conversations" in warning
    assert "student.chat_template" in warning
