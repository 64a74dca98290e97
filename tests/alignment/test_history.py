"""Histories of chunks, with templates and tokenizers that drop, trim or rewrite contents."""

from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from nemo_opd.alignment import ChatRenderer, TokenAligner, align_chat
from nemo_opd.alignment.aligner import content_history
from nemo_opd.types import HISTORY_CHANGED, HISTORY_REWRITTEN, HISTORY_SAME, Alignment
from tests.alignment.chat_fixture import assistant, call, small_chat, user, with_template
from tests.tokenizers_fixture import byte_level, rebuilt

# Drops the text before `|` in all messages except the last, as Qwen3 drops the thinking of earlier turns.
DROPS = """{% for m in messages %}{{ '<|begin_of_text|>' + m.role + '\\n' }}
{{- m.content if loop.last else m.content.split('|')[-1] }}{{ '<|eot_id|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|begin_of_text|>assistant\\n' }}{% endif %}"""
CALLS = """{% for m in messages %}<bos>{{ m.role }}<pad>{{ m.content }}
{%- for c in m.tool_calls or [] %}CALL {{ c.function.name }}({{ c.function.arguments }}){% endfor %}<end_of_turn>
{% endfor %}{% if add_generation_prompt %}<bos>assistant<pad>{% endif %}"""
OTHER_CALLS = CALLS.replace("CALL {{ c.function.name }}", '{"f": {{ c.function.name }}}').replace("<pad>", "\n")
OTHER_CALLS = OTHER_CALLS.replace("<bos>", "<|begin_of_text|>").replace("<end_of_turn>", "<|eot_id|>")


def aligned(student: Any, teacher: Any, messages: list[Any]) -> tuple[Alignment, list[str]]:
    """Return the alignment, and the student's text of each chunk (special tokens by name)."""
    student_tokens, teacher_tokens = ChatRenderer(student)(messages), ChatRenderer(teacher)(messages)
    alignment = align_chat(TokenAligner(student, teacher), student_tokens, teacher_tokens)
    return alignment, [
        student.decode(student_tokens.ids[start:stop]) for start, stop in alignment.bounds[:, :2].tolist()
    ]


def read_with(alignment: Alignment, texts: list[str], history: int) -> str:
    """Return the text of the exact chunks with this history, without special tokens."""
    chunks = zip(texts, alignment.history.tolist(), alignment.inexact | alignment.special, strict=True)
    return "".join(text for text, chunk_history, is_excluded in chunks if chunk_history == history and not is_excluded)


def test_what_follows_a_dropped_content_is_changed() -> None:
    """Bug: a chunk counts as having the same history although the teacher has not read the dropped content."""
    messages = [user("The fox"), assistant("123 45|sleeps"), user("The dog"), assistant("jumps|over")]
    student, teacher = small_chat("plain"), with_template(byte_level(), DROPS)
    alignment, texts = aligned(student, teacher, messages)
    assert read_with(alignment, texts, HISTORY_SAME) == "The fox"
    assert read_with(alignment, texts, HISTORY_CHANGED) == "sleepsThe dogjumps|over"
    # Both sides drop it, so their histories are equal.
    alignment, _ = aligned(
        with_template(small_chat("trimmed"), DROPS), with_template(small_chat("plain"), DROPS), messages
    )
    assert not alignment.history.any()


def test_trimmed_white_space_is_rewritten() -> None:
    messages = [user("The fox \n"), assistant("sleeps"), user("a"), assistant("b")]
    alignment, texts = aligned(small_chat("plain"), small_chat("trimmed"), messages)
    assert read_with(alignment, texts, HISTORY_SAME) == "The fox"
    assert read_with(alignment, texts, HISTORY_REWRITTEN) == "sleepsab"
    ends = alignment.history[alignment.special].tolist()
    assert ends == sorted(ends)
    assert ends[-1] == HISTORY_REWRITTEN


def test_calls_in_another_form_say_the_same() -> None:
    """Bug: after the first call of an agent's conversation, no chunk has the same history."""
    messages = [
        user("The fox"),
        assistant("", tool_calls=[call("calculator", {"a": 1})]),
        user("42"),
        assistant("It is"),
    ]
    student = with_template(small_chat("plain"), CALLS)
    alignment, _ = aligned(student, with_template(byte_level(), OTHER_CALLS), messages)
    assert not alignment.history.any()
    silent = OTHER_CALLS.replace("m.tool_calls or []", "[]")
    alignment, texts = aligned(student, with_template(byte_level(), silent), messages)
    assert read_with(alignment, texts, HISTORY_CHANGED) == "42It is"


@pytest.mark.parametrize(
    ("text", "rewritten"),
    [("The cafe\u0301 sleeps", " sleeps"), ("a\u0301 fox e\u0323\u0301 dog", " fox dog"), ("no difference", "")],
)
def test_composed_accents_are_rewritten(text: str, rewritten: str) -> None:
    student, teacher = byte_level(), byte_level(nfc=True)
    ids = student(text)["input_ids"]
    alignment = TokenAligner(student, teacher).align(ids, teacher(text)["input_ids"])
    texts = [student.decode(ids[start:stop]) for start, stop in alignment.bounds[:, :2].tolist()]
    # The second accent of e is a separate chunk; half of it decodes to a replacement character.
    assert read_with(alignment, texts, HISTORY_REWRITTEN).replace(" \ufffd\ufffd", "") == rewritten
    assert not (alignment.history == HISTORY_CHANGED).any()


def test_text_behind_other_text_is_changed() -> None:
    student, teacher = byte_level(), byte_level(455)
    pair = [
        side(text)["input_ids"] for side, text in ((student, "The fox sleeps now"), (teacher, "The dog sleeps now"))
    ]
    alignment = TokenAligner(student, teacher).align(*pair)
    texts = [student.decode(pair[0][start:stop]) for start, stop in alignment.bounds[:, :2].tolist()]
    assert read_with(alignment, texts, HISTORY_SAME) == "The"
    assert read_with(alignment, texts, HISTORY_CHANGED).endswith(" sleeps now")
    assert (np.diff(alignment.history) >= 0).all()


MARKS = ("<s>", "</s>")
BODY = " The fox sleeps and the dog jumps over 123 45 lazy foxes." * 3


def marked(begins: bool) -> Any:
    """Return a tokenizer with the special tokens <s> and </s>; <s> begins each text if `begins`."""
    tokenizer = byte_level(extra=("<|begin_of_text|>", *MARKS))
    ids = [(mark, tokenizer.convert_tokens_to_ids(mark)) for mark in MARKS]
    single = "<s> $A" if begins else "$A"
    tokenizer = rebuilt(tokenizer, post_processor=processors.TemplateProcessing(single=single, special_tokens=ids))
    tokenizer.bos_token = "<s>"
    return tokenizer


@pytest.mark.parametrize("begins", [False, True])
@pytest.mark.parametrize("text", ["Once <s>30</s> now" + BODY, "<s>30</s> now" + BODY, "e\u0301 <s>a" + BODY + "</s>"])
def test_a_special_token_that_one_side_spells_costs_its_place(text: str, begins: bool) -> None:
    """Bug: after one <s> in a document, no chunk has the same history."""
    for student, teacher in ((marked(begins), byte_level(455)), (byte_level(455), marked(begins))):
        ids = student(text)["input_ids"]
        alignment = TokenAligner(student, teacher).align(ids, teacher(text)["input_ids"])
        assert not (alignment.history == HISTORY_CHANGED).any()
        texts = [student.decode(ids[start:stop]) for start, stop in alignment.bounds[:, :2].tolist()]
        read = read_with(alignment, texts, HISTORY_REWRITTEN) + read_with(alignment, texts, HISTORY_SAME)
        assert len(BODY) <= len(read) <= len(text) + 1


@pytest.mark.parametrize("teacher_text", ["Once <a>30</s> now", "Once <s>31</s> now"])
def test_a_special_token_that_one_side_has_not_read_is_changed(teacher_text: str) -> None:
    """Bug: any text counts as a mark."""
    student, teacher = marked(begins=False), byte_level(455)
    alignment = TokenAligner(student, teacher).align(
        student("Once <s>30</s> now" + BODY)["input_ids"], teacher(teacher_text + BODY)["input_ids"]
    )
    assert alignment.history[-1] == HISTORY_CHANGED


@pytest.mark.parametrize(
    ("student", "teacher", "contents", "expected"),
    [
        ("So", "So", (), HISTORY_SAME),
        ("<a>So</a>", "[So]", ("So",), HISTORY_SAME),
        ("<a>So</a>", "[So]", (), HISTORY_CHANGED),
        (" So\n", "So", (" So\n",), HISTORY_REWRITTEN),
        ("e\u0301", "\u00e9", ("e\u0301",), HISTORY_REWRITTEN),
        ("hm So", "So", ("hm So",), HISTORY_CHANGED),
        ("user So more", "So", ("hm So",), HISTORY_REWRITTEN),
        ("", "So", ("So",), HISTORY_CHANGED),
        ("", "[]", ("",), HISTORY_SAME),
        ('a "b"\n', '{"output": "a \\"b\\"\\n"}', ('a "b"\n',), HISTORY_REWRITTEN),
        ("a\u2581b", "a b", ("a\u2581b",), HISTORY_REWRITTEN),
        # Bug: dropped thinking whose text the answer repeats is found in the answer.
        ("<think>4</think>The answer is 4", "The answer is 4", ("The answer is 4", "4"), HISTORY_CHANGED),
        ("<think>4</think>The answer is 4", "[4]The answer is 4", ("The answer is 4", "4"), HISTORY_SAME),
        ("4 The answer is 4", "The answer  is 4", ("The answer is 4", "4"), HISTORY_CHANGED),
        ("4 The answer is 4", "4 The answer  is 4", ("The answer is 4", "4"), HISTORY_REWRITTEN),
        ("The answer is 4\n", "The answer is 4", ("The answer is 4", "4"), HISTORY_REWRITTEN),
        ("[ab]b", "b(ab)", ("b", "ab"), HISTORY_SAME),
        ("<a>So</a>So", "<a>So</a>", ("So", "So"), HISTORY_CHANGED),
    ],
)
def test_how_two_renderings_of_a_message_differ(
    student: str, teacher: str, contents: tuple[str, ...], expected: int
) -> None:
    assert content_history(student.encode(), teacher.encode(), contents) == expected
