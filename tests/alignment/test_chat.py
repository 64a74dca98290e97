"""One conversation under two templates: real ones, and synthetic ones on machines without them."""

from dataclasses import replace
from functools import cache
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import ChatRenderer, ChatTokens, TokenAligner, align_chat
from nemo_opd.errors import AlignmentError
from tests.alignment.chat_fixture import assistant, call, small_chat, system, tool, user
from tests.alignment.chat_oracle import TEMPLATES, Segment, check_alignment, check_tokens, turn_ends
from tests.alignment.lines import lines_run
from tests.tokenizers_fixture import real_tokenizer

PAIRS = list(permutations(TEMPLATES, 2))
PLAIN = {
    "single": [user("Name a fox."), assistant("Reynard, 1 of 12 in 2024.")],
    "multi": [user("Hi"), assistant("Hello!"), user("def f(x):\n    return x"), assistant("f is\n\nthe identity.")],
    "system": [system("Be brief."), user("Hi"), assistant("Hello!"), user("Bye"), assistant("Bye.")],
    "template text": [user("user"), assistant("assistant\n\nmodel\nuser"), user("model"), assistant("im_end|>")],
    "repeated": [user("Hi"), assistant("Hi"), user("Hi"), assistant("Hi"), user("Hi"), assistant("Hi")],
    "open": [user("Hi"), assistant("Hello!"), user("And now?")],
}
"""ASCII contents that every template writes unchanged."""
ODD = {
    "white space": [system(" sys\n"), user("  Hi \n"), assistant("\n\n Hello \n\n"), user("\t"), assistant(" a ")],
    "special as text": [user("a<|im_end|>b<|eot_id|>"), assistant("<|im_end|>\n<|im_start|>user\nx<end_of_turn>")],
    "empty": [system(""), user(""), assistant(""), user(""), assistant("")],
    "unicode": [
        user("Cafe\u0301 東京"),
        assistant("e\u0301 \u0301 👩‍👩‍👧‍👦 \U000f0000 ▁ ﬁ"),
        user("한"),
        assistant("é"),
    ],
    "thinking": [user("Hi"), assistant("<think>\nhm\n</think>\n\nHello"), user("?"), assistant("<think>a</think>b")],
}
PARTS = (
    *("Hi", "12345", " ", "  ", "\n", "\n\n", "\t", "user", "assistant\n", "model\n", "<think>\n", "</think>", "</s>"),
    *("e\u0301", "\u0301", "é", "東京", "👩\u200d👩\u200d👧", "▁", "\U000f0000"),
    *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|im_start|>assistant\n", "<start_of_turn>model\n"),
)
CONTENTS = st.lists(
    st.sampled_from(PARTS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=3), max_size=6
).map("".join)


@cache
def real_aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(real_tokenizer(student), real_tokenizer(teacher))


@cache
def real_renderer(name: str) -> ChatRenderer:
    return ChatRenderer(real_tokenizer(name))


@cache
def small_aligner() -> TokenAligner:
    return TokenAligner(small_chat("trimmed"), small_chat("plain"))


def small_tokens(messages: list[dict[str, object]]) -> tuple[ChatTokens, ChatTokens]:
    return ChatRenderer(small_chat("trimmed"))(messages), ChatRenderer(small_chat("plain"))(messages)


def check_complete(alignment_of: TokenAligner, student: ChatTokens, teacher: ChatTokens) -> None:
    """Check that every content token of both sides is in an exact chunk."""
    alignment = align_chat(alignment_of, student, teacher)
    for tokens, chunk_id in ((student, alignment.student_chunk_id), (teacher, alignment.teacher_chunk_id)):
        for start, stop in tokens.spans.tolist():
            assert (chunk_id[start:stop] >= 0).all()
            assert not alignment.inexact[chunk_id[start:stop]].any()


@pytest.mark.tokenizers
@pytest.mark.parametrize("case", [*PLAIN, *ODD])
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_real_templates(student: str, teacher: str, case: str) -> None:
    """Bugs: a content is found by search, a span is off by one token, a chunk crosses a message's edge."""
    messages = (PLAIN | ODD)[case]
    tokens = []
    for name in (student, teacher):
        rendered = real_renderer(name)(messages)
        expected = real_tokenizer(name).apply_chat_template(messages, tokenize=True)["input_ids"]
        assert rendered.ids.tolist() == expected
        check_tokens(real_tokenizer(name), rendered, TEMPLATES[name](messages))
        tokens.append(rendered)
    check_alignment(real_aligner(student, teacher), *tokens)
    if case in PLAIN:
        check_complete(real_aligner(student, teacher), *tokens)


@pytest.mark.tokenizers
@pytest.mark.parametrize("case", [case for case in PLAIN if case != "system"])
@pytest.mark.parametrize(("student", "teacher"), PAIRS)
def test_ends_of_turns_pair(student: str, teacher: str, case: str) -> None:
    """Bug: ends of turns are paired by spelling, which pairs none; they pair in order."""
    tokens = [real_renderer(name)(PLAIN[case]) for name in (student, teacher)]
    alignment = align_chat(real_aligner(student, teacher), *tokens)
    ends = [turn_ends(real_tokenizer(name), side) for name, side in zip((student, teacher), tokens, strict=True)]
    assert len(ends[0]) == len(ends[1]) == len(PLAIN[case])
    paired = alignment.student_chunk_id[ends[0]]
    assert (paired >= 0).all()
    assert alignment.special[paired].all()
    assert paired.tolist() == alignment.teacher_chunk_id[ends[1]].tolist()


@pytest.mark.tokenizers
def test_a_system_prompt_merged_into_the_first_user_turn() -> None:
    """Bug: the end of Llama's system turn, which Gemma does not write, takes the partner of a later end."""
    tokens = [real_renderer(name)(PLAIN["system"]) for name in ("llama3_1", "gemma3")]
    alignment = align_chat(real_aligner("llama3_1", "gemma3"), *tokens)
    ends = turn_ends(real_tokenizer("llama3_1"), tokens[0])
    assert (alignment.student_chunk_id[ends] >= 0).tolist() == [False, True, True, True, True]
    assert (alignment.teacher_chunk_id[turn_ends(real_tokenizer("gemma3"), tokens[1])] >= 0).all()


@pytest.mark.tokenizers
def test_thinking_is_aligned_where_both_sides_show_it() -> None:
    """Bug: thinking stays unaligned although Llama shows it as text and Qwen as `reasoning_content` or inline."""
    answer = "<think>\nA fox is red.\n</think>\n\nRed."
    student = real_renderer("llama3_1")([user("Which colour?"), assistant(answer)])
    for message in (assistant(answer), assistant("Red.", reasoning_content="A fox is red.")):
        teacher = real_renderer("qwen3")([user("Which colour?"), message])
        check_complete(real_aligner("llama3_1", "qwen3"), student, teacher)


@pytest.mark.tokenizers
def test_thinking_that_one_side_drops_costs_only_itself() -> None:
    """Bug: the answer after earlier thinking, which Qwen drops, is not aligned."""
    messages = [user("Hi"), assistant("<think>\nhm\n</think>\n\nHello dear old fox"), user("?"), assistant("Yes")]
    student, teacher = real_renderer("qwen3")(messages), real_renderer("llama3_1")(messages)
    alignment = align_chat(real_aligner("qwen3", "llama3_1"), student, teacher)
    start, stop = student.spans[1].tolist()
    chunks = alignment.student_chunk_id[start + 1 : stop]
    assert (chunks >= 0).all()
    assert not alignment.inexact[chunks].any()


@pytest.mark.tokenizers
def test_tool_calls_and_results() -> None:
    """Bug: messages around tool calls shift, as templates write calls differently."""
    messages = [
        system("Use tools."),
        user("Weather in Paris?"),
        assistant("Let me see.", reasoning_content="A tool call.", tool_calls=[call("weather", {"city": "Paris"})]),
        tool('{"t": 3, "sky": "grey"}'),
        tool("none"),
        assistant("3 degrees and grey."),
    ]
    for student, teacher in permutations(("llama3_1", "qwen3")):
        tokens = [real_renderer(name)(messages) for name in (student, teacher)]
        check_alignment(real_aligner(student, teacher), *tokens)
        alignment = align_chat(real_aligner(student, teacher), *tokens)
        for side, chunk_id in zip(tokens, (alignment.student_chunk_id, alignment.teacher_chunk_id), strict=True):
            for k in (0, 1, 4, 5):
                start, stop = side.spans[k].tolist()
                assert (chunk_id[start : stop - (k == 4)] >= 0).all()


@pytest.mark.tokenizers
@settings(max_examples=30)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=5), with_system=st.booleans())
def test_any_contents_under_real_templates(contents: list[str], with_system: bool) -> None:
    """Bug: a content that looks like the template, a mark, thinking or a special token moves an edge.

    With "</think>" in a content, its start and end are undefined; only the mask is compared.
    """
    messages = conversation(contents, with_system)
    tokens = {name: real_renderer(name)(messages) for name in TEMPLATES}
    for name, rendered in tokens.items():
        segments = TEMPLATES[name](messages)
        for k, message in enumerate(messages):
            if "</think>" in message["content"]:
                segments = [replace(segment, message=None) if segment.message == k else segment for segment in segments]
        check_tokens(real_tokenizer(name), rendered, segments)
    for student, teacher in PAIRS:
        check_alignment(real_aligner(student, teacher), tokens[student], tokens[teacher])


@settings(max_examples=100)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=5), cuts=st.tuples(st.integers(0, 80), st.integers(0, 80)))
def test_any_contents_under_synthetic_templates(contents: list[str], cuts: tuple[int, int]) -> None:
    messages = conversation(contents, False)
    student, teacher = small_tokens(messages)
    check_tokens(small_chat("trimmed"), student, synthetic("trimmed", messages))
    check_tokens(small_chat("plain"), teacher, synthetic("plain", messages))
    check_alignment(small_aligner(), student, teacher)
    check_alignment(small_aligner(), student.cut(cuts[0]), teacher.cut(cuts[1]))


def synthetic(name: str, messages: list[dict[str, str]]) -> list[Segment]:
    segments = [Segment("<|begin_of_text|>")] if name == "trimmed" else []
    for k, message in enumerate(messages):
        is_assistant = message["role"] == "assistant"
        if name == "trimmed":
            segments += [Segment(f"[{message['role']}]\n"), Segment(message["content"].strip(), k, is_assistant)]
            segments += [Segment("<|eot_id|>", written=is_assistant)]
        else:
            segments += [Segment(f"<bos>{message['role']}<pad>"), Segment(message["content"], k, is_assistant)]
            segments += [Segment("<end_of_turn>", written=is_assistant), Segment("\n")]
    return segments


def conversation(contents: list[str], with_system: bool) -> list[dict[str, str]]:
    turns = [(user, assistant)[k % 2](content) for k, content in enumerate(contents)]
    return [system("Be brief."), *turns] if with_system else turns


@pytest.mark.parametrize("case", PLAIN)
def test_synthetic_templates(case: str) -> None:
    student, teacher = small_tokens(PLAIN[case])
    check_complete(small_aligner(), student, teacher)
    alignment = align_chat(small_aligner(), student, teacher)
    assert alignment.special.sum() >= len(PLAIN[case])


def test_a_cut_keeps_the_chunks_that_are_whole_on_both_sides() -> None:
    """Bugs at any pair of lengths: the last chunk is complete on one side only; bounds shift."""
    student, teacher = small_tokens(PLAIN["system"])
    bounds = align_chat(small_aligner(), student, teacher).bounds
    for s_length in range(0, len(student.ids) + 1, 3):
        for t_length in range(0, len(teacher.ids) + 1, 5):
            cut = align_chat(small_aligner(), student.cut(s_length), teacher.cut(t_length))
            expected = bounds[(bounds[:, 1] <= s_length) & (bounds[:, 3] <= t_length)]
            assert cut.bounds.tolist() == expected.tolist()
            assert (len(cut.student_chunk_id), len(cut.teacher_chunk_id)) == (
                min(s_length, len(student.ids)),
                min(t_length, len(teacher.ids)),
            )


def test_cut_keeps_every_message() -> None:
    student, _ = small_tokens(PLAIN["multi"])
    cut = student.cut(5)
    assert (len(cut.ids), len(cut.assistant_mask), cut.spans.max()) == (5, 5, 5)
    assert len(cut.spans) == len(student.spans)
    assert cut.spans.dtype == np.int32


def test_different_numbers_of_messages_are_refused() -> None:
    student, _ = small_tokens(PLAIN["single"])
    _, teacher = small_tokens(PLAIN["multi"])
    with pytest.raises(AlignmentError, match="2 messages and the teacher's 4"):
        align_chat(small_aligner(), student, teacher)


def test_ids_of_another_tokenizer_are_refused() -> None:
    student, teacher = small_tokens(PLAIN["single"])
    wrong = ChatTokens(student.ids + 100_000, student.assistant_mask, student.spans)
    with pytest.raises(AlignmentError, match="token 0 of the student's conversation is 1"):
        align_chat(small_aligner(), wrong, teacher)


@pytest.mark.tokenizers
def test_no_python_is_run_per_token() -> None:
    """Bug: Python runs for each token and not for each turn: thousands of tokens should take a few milliseconds."""
    aligner = real_aligner("llama3_1", "qwen3")

    def lines(sentences: int) -> int:
        turns = [f"Message {k}: " + "a fox jumps over dog number 12. " * sentences for k in range(10)]
        student, teacher = (real_renderer(name)(conversation(turns, False)) for name in ("llama3_1", "qwen3"))
        assert min(len(student.ids), len(teacher.ids)) > 80 * sentences
        return lines_run(lambda: align_chat(aligner, student, teacher))

    first, short, long = lines(3), lines(3), lines(50)
    assert first >= short == long, "the first call may include preparation"
