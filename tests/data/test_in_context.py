"""Teachers with a prompt of their own: the student's ids stay, and only the response is compared."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.config.teacher import Context as ContextSettings
from nemo_opd.config.teacher import field_names
from nemo_opd.data.collate import collate, compared
from nemo_opd.data.context import LEAST, Context, PrivilegedPrompt, leakage
from nemo_opd.data.conversations import ChatSampleMaker
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer
from nemo_opd.data.rollouts import CrossTokenizerText, RolloutSampleMaker
from nemo_opd.data.row_types import FIELD, OTHER, Conversation, Prompt, Rollout
from nemo_opd.data.samples import SameTokenizer, Sample, TeacherSample, decoded, encoded
from nemo_opd.errors import DataError
from nemo_opd.rollout.collect import dataset_rollout
from nemo_opd.rollout.renderer import TextRenderer
from tests.alignment.chat_fixture import with_template
from tests.data.test_rollouts import CALL, PIECES, ROLES, STUDENT, TEACHER, TEXT_CHARACTERS, collected, conversation
from tests.rollout.templates import talking
from tests.tokenizers_fixture import real_tokenizer

HINT = {"hint": FIELD + "hint"}
NAMES = st.sampled_from(["{prompt}", "{hint}", "{{", "}}"])
TEMPLATES = st.lists(st.one_of(NAMES, TEXT_CHARACTERS.map(lambda text: text.replace("{", "").replace("}", ""))))


def of_texts(tokenizer: Any, reader: Any, max_length: int = 999, **context: Any) -> PrivilegedPrompt[Any]:
    prompt_context = Context(ContextSettings(**context), HINT, "teachers.0.context")
    return PrivilegedPrompt(reader, prompt_context, tokenizer, None, pieces_of(tokenizer).vocab_size, max_length)


def of_chats(tokenizer: Any, reader: Any, max_length: int = 999, **context: Any) -> PrivilegedPrompt[Any]:
    renderer = ChatEncoder.of(tokenizer, 999, {}).renderer
    return replace(of_texts(tokenizer, reader, max_length, **context), renderer=renderer)


def crossing_text() -> CrossTokenizerText:
    return CrossTokenizerText.of(TEACHER, 999, TokenAligner(STUDENT, TEACHER))


def hinted(rollout: Rollout, hint: str, other_hint: str = "") -> Rollout:
    fields = {FIELD + "hint": hint, OTHER + FIELD + "hint": other_hint}
    return replace(rollout, prompt=replace(rollout.prompt, fields=fields))


def text_made(rollout: Rollout, *teachers: Any) -> Sample:
    return RolloutSampleMaker(PIECES.lengths, teachers)(rollout)


def read(teacher: TeacherSample) -> list[int]:
    return teacher.tokens.ids.tolist()


def check_verbatim(sample: Sample, teacher: TeacherSample) -> None:
    """Check that the teacher's compared tokens are the student's ids, at positions that may differ."""
    assert teacher.chunks is None
    assert teacher.moved_by is not None
    places = np.flatnonzero(teacher.tokens.loss_mask)
    assert teacher.tokens.ids[places].tolist() == sample.student.ids[places - teacher.moved_by].tolist()
    assert sample.student.loss_mask[places - teacher.moved_by].all()


@given(TEMPLATES, TEXT_CHARACTERS, st.text(min_size=1, max_size=20), st.integers(1, 40))
@settings(max_examples=80)
def test_no_context_reaches_the_student(parts: list[str], hint: str, response: str, max_length: int) -> None:
    """Catches context in the student's tokens, and a teacher that reads more or less than template and sampled ids."""
    template = "".join(parts)
    if not field_names(template):
        template += "{hint}"
    rollout = collected(STUDENT(response, add_special_tokens=False)["input_ids"], "length")
    if not template.strip():
        return
    teacher = of_texts(STUDENT, SameTokenizer(), template=template)
    sample, plain = text_made(hinted(rollout, hint), teacher), text_made(rollout, SameTokenizer())

    assert sample.student.ids.tolist() == plain.student.ids.tolist()
    assert sample.student.loss_mask.tolist() == plain.student.loss_mask.tolist()
    (teacher_sample,) = sample.teachers
    expected = template.format(prompt="The quick", hint=hint)
    assert read(teacher_sample) == [*STUDENT(expected)["input_ids"], *rollout.ids[rollout.loss_mask].tolist()]
    check_verbatim(sample, teacher_sample)
    assert teacher_sample.tokens.loss_mask.sum() == rollout.num_sampled - (
        teacher_sample.moved_by == -len(STUDENT("The quick")["input_ids"])
    )
    try:
        cut = text_made(hinted(rollout, hint), replace(teacher, max_length=max_length)).teachers[0]
    except DataError:
        assert max_length <= len(STUDENT(expected)["input_ids"])
    else:
        assert read(cut) == read(teacher_sample)[:max_length]


def test_another_tokenizer_is_aligned_on_the_response_alone() -> None:
    """Bug: the prompts, which differ, were aligned too, so that all later chunks had a different history."""
    ids = STUDENT(" brown fox 123", add_special_tokens=False)["input_ids"]
    rollout = hinted(collected(ids, "length"), "It is a fox.")
    template = "{hint} 東京\n{prompt}"
    (teacher,) = text_made(rollout, of_texts(TEACHER, crossing_text(), template=template)).teachers
    assert teacher.chunks is not None
    ours, theirs = teacher.chunks.compared
    assert ((ours >= 0) == rollout.loss_mask).all()
    assert ((theirs >= 0) == teacher.tokens.loss_mask).all()
    assert TEACHER.decode(teacher.tokens.ids[teacher.tokens.loss_mask]) == " brown fox 123"
    assert TEACHER.decode(teacher.tokens.ids[~teacher.tokens.loss_mask]) == "It is a fox. 東京\nThe quick"


@pytest.mark.parametrize(("template", "learned"), [("{hint} T", " fox"), ("{prompt}\n", "he fox")])
def test_a_token_across_the_prompts_end_is_not_compared(template: str, learned: str) -> None:
    """Bug: a teacher's token that merges the prompt's end with the response's first letters is compared."""
    rollout = hinted(collected(STUDENT("he fox", add_special_tokens=False)["input_ids"], "length"), "a")
    (teacher,) = text_made(rollout, of_texts(TEACHER, crossing_text(), template=template)).teachers
    assert teacher.chunks is not None
    for ids, chunks, tokenizer in (
        (rollout.ids, teacher.chunks.compared[0], STUDENT),
        (teacher.tokens.ids, teacher.chunks.compared[1], TEACHER),
    ):
        assert tokenizer.decode(ids[chunks >= 0]) == learned


def test_a_datasets_token_across_the_prompts_end_is_read() -> None:
    """Bug: for "Th" + "e fox" the teacher read the response " fox", as the student's prompt has the token "The"."""
    rollout = dataset_rollout(Prompt(0, "Th", response="e fox"), TextRenderer(STUDENT), 99)
    assert rollout.before == "e"
    same, cross = text_made(
        hinted(rollout, "a"),
        of_texts(STUDENT, SameTokenizer(), template="{hint}: {prompt}"),
        of_texts(TEACHER, crossing_text(), template="{hint}: {prompt}"),
    ).teachers
    assert STUDENT.decode(same.tokens.ids, skip_special_tokens=True) == "a: The fox"
    assert TEACHER.decode(cross.tokens.ids, skip_special_tokens=True) == "a: The fox"


def test_turns_behind_another_conversation() -> None:
    """Catches a teacher that lacks the hint, its template, a sampled id or the environment's answer."""
    student = talking("tagged")
    rollout = hinted(conversation(student, f"I ask. {CALL}", "It is 42."), "six sevens are 42")
    context = {"template": "{prompt} ({hint})", "system_prompt": "You know {hint}."}
    teacher = with_template(TEACHER, ROLES)
    crossing = CrossTokenizer(ChatEncoder.of(teacher, 999, {}), TokenAligner(student, teacher))
    teachers = of_chats(student, SameTokenizer(), **context), of_chats(teacher, crossing, **context)
    sample = RolloutSampleMaker(pieces_of(student).lengths, teachers)(rollout)
    prompt_messages = [{"role": "system", "content": "You know six sevens are 42."}, *rollout.prompt.content]
    prompt_messages[-1] = {"role": "user", "content": "6 * 7? (six sevens are 42)"}

    same, cross = sample.teachers
    check_verbatim(sample, same)
    start = int(rollout.turns[0, 0])
    prompt = student.apply_chat_template(
        prompt_messages, tools=rollout.prompt.tools, add_generation_prompt=True, tokenize=False
    )
    assert read(same) == [*student(prompt, add_special_tokens=False)["input_ids"], *rollout.ids[start:].tolist()]
    assert same.tokens.loss_mask.sum() == rollout.num_sampled

    assert cross.chunks is not None
    ours, theirs = cross.chunks.compared
    assert ((ours >= 0) == rollout.loss_mask).all()
    assert ((theirs >= 0) == cross.tokens.loss_mask).all()
    messages = [*prompt_messages, *rollout.messages[len(rollout.prompt.content) :]]
    rendered = teacher.apply_chat_template(messages, tokenize=False)
    assert TEACHER.decode(cross.tokens.ids) == rendered.rstrip("\n")


TALK = [
    {"role": "user", "content": "The quick brown fox?"},
    {"role": "assistant", "content": "jumps over 123 dogs"},
    {"role": "user", "content": "def f(x)"},
    {"role": "assistant", "content": "the lazy dog sleeps"},
]
FIELDS = {FIELD + "hint": "a dog that sleeps", OTHER + FIELD + "hint": "東京"}


def chat_made(length: int = 999, talk: list[dict[str, str]] = TALK, **context: Any) -> tuple[Any, Any, Sample]:
    student, teacher = talking("tagged"), with_template(TEACHER, ROLES)
    crossing = CrossTokenizer(ChatEncoder.of(teacher, 999, {}), TokenAligner(student, TEACHER))
    readers = of_chats(student, SameTokenizer(), **context), of_chats(teacher, crossing, **context)
    maker = ChatSampleMaker(ChatEncoder.of(student, length, {}), readers)
    return student, teacher, maker(Conversation(talk, None, FIELDS))


@pytest.mark.parametrize(
    ("context", "learned"),
    [
        ({"template": "{prompt} {hint}"}, [1]),
        ({"key": "hint"}, [1]),
        ({"system_prompt": "Say {hint}."}, [0, 1]),
    ],
)
def test_a_conversation_of_the_data(context: dict[str, str], learned: list[int]) -> None:
    """Catches compared answers before the last difference of the prompts, and a loss on other tokens."""
    student, teacher, sample = chat_made(**context)
    answers = [TALK[1]["content"] + "<|im_end|>", TALK[3]["content"] + "<|im_end|>"]
    expected = "".join(answers[k] for k in learned)
    assert student.decode(sample.student.ids[sample.student.loss_mask]) == "".join(answers)
    same, cross = sample.teachers
    check_verbatim(sample, same)
    assert student.decode(same.tokens.ids[same.tokens.loss_mask]) == expected
    assert cross.chunks is not None
    ours, theirs = cross.chunks.compared
    assert student.decode(sample.student.ids[ours >= 0]) == expected
    assert teacher.decode(cross.tokens.ids[theirs >= 0]) == expected
    for tokenizer, teacher_sample in ((student, same), (teacher, cross)):
        assert "a dog that sleeps" in tokenizer.decode(
            teacher_sample.tokens.ids[: int(np.flatnonzero(teacher_sample.tokens.loss_mask)[0])]
        )
    counted = compared(sample)
    num_bytes = {
        int(side.num_bytes.sum())
        for side in (counted.student, *(teacher_sample.tokens for teacher_sample in counted.teachers))
    }
    assert num_bytes == {sum(len(TALK[2 * k + 1]["content"]) for k in learned)}


def test_a_conversation_that_the_assistant_begins() -> None:
    """Bug: an IndexError, as nothing precedes the first answer, which belongs to the prompt here."""
    student, _, sample = chat_made(
        talk=[{"role": "assistant", "content": "Hello."}, *TALK], system_prompt="Say {hint}."
    )
    same, cross = sample.teachers
    answers = [TALK[1]["content"] + "<|im_end|>", TALK[3]["content"] + "<|im_end|>"]
    assert student.decode(same.tokens.ids[same.tokens.loss_mask]) == "".join(answers)
    assert cross.chunks is not None
    assert student.decode(sample.student.ids[cross.chunks.compared[0] >= 0]) == "".join(answers)


def test_nothing_is_learned_from_a_conversation_without_a_response() -> None:
    """Bug: the student learned the greeting from a teacher that read it without the context."""
    _, _, sample = chat_made(talk=[{"role": "assistant", "content": "Hello."}, TALK[0]], system_prompt="Say {hint}.")
    same, cross = sample.teachers
    assert sample.student.loss_mask.any()
    assert not same.tokens.loss_mask.any()
    assert not cross.tokens.loss_mask.any()
    assert cross.chunks is not None
    assert (cross.chunks.student == -1).all()


@pytest.mark.tokenizers
@pytest.mark.parametrize("names", [("qwen3", "llama3_1"), ("llama3_1", "qwen3")])
def test_real_templates(names: tuple[str, str]) -> None:
    """Catches templates that write thinking blocks or dates into the compared part."""
    student, teacher = map(real_tokenizer, names)
    crossing = CrossTokenizer(ChatEncoder.of(teacher, 999, {}), TokenAligner(student, teacher))
    context = {"template": "{prompt}\n{hint}", "system_prompt": "Say {hint}."}
    readers = of_chats(student, SameTokenizer(), **context), of_chats(teacher, crossing, **context)
    sample = ChatSampleMaker(ChatEncoder.of(student, 999, {}), readers)(Conversation(TALK, None, FIELDS))
    same, cross = sample.teachers
    check_verbatim(sample, same)
    prompt_messages = [{"role": "system", "content": "Say a dog that sleeps."}, *TALK[:2]]
    prompt_messages.append({"role": "user", "content": "def f(x)\na dog that sleeps"})
    prompt = student.apply_chat_template(prompt_messages, add_generation_prompt=True, tokenize=False)
    start = int(np.flatnonzero(same.tokens.loss_mask)[0])
    assert student.decode(same.tokens.ids[:start]) == prompt
    assert TALK[3]["content"] in student.decode(same.tokens.ids[start:])
    assert cross.chunks is not None
    ours, theirs = cross.chunks.compared
    for tokenizer, ids, chunks in ((student, sample.student.ids, ours), (teacher, cross.tokens.ids, theirs)):
        assert TALK[3]["content"] in tokenizer.decode(ids[chunks >= 0])
        assert TALK[1]["content"] not in tokenizer.decode(ids[chunks >= 0])


@pytest.mark.parametrize("length", range(20, 90, 7))
def test_a_cut_conversation_is_compared_as_far_as_it_goes(length: int) -> None:
    _, _, full = chat_made(template="{hint}")
    _, _, cut = chat_made(length, template="{hint}")
    assert len(cut.student) == min(length, len(full.student))
    for teacher, uncut in zip(cut.teachers, full.teachers, strict=True):
        assert read(teacher) == read(uncut)[: len(teacher.tokens)]
    check_verbatim(cut, cut.teachers[0])
    ours, uncut = (sample.teachers[1].chunks for sample in (cut, full))
    assert ours is not None
    assert uncut is not None
    assert set(ours.student.tolist()) <= set(uncut.student.tolist())


def test_the_same_response_without_the_context_and_with_another() -> None:
    _, _, sample = chat_made(template="{prompt} {hint}", gap_every=1, contrast=True)
    for tokenizer, teacher in zip((talking("tagged"), TEACHER), sample.teachers, strict=True):
        texts = [tokenizer.decode(tokens.ids) for tokens in (teacher.tokens, *teacher.variants)]
        told_of = [[hint in text for hint in FIELDS.values()] for text in texts]
        assert told_of == [[True, False], [False, False], [False, True]]
        assert (
            len({tokenizer.decode(tokens.ids[tokens.loss_mask]) for tokens in (teacher.tokens, *teacher.variants)}) == 1
        )
    same, cross = sample.teachers
    _, _, plain = chat_made(template="{prompt}")
    assert same.variants[0].ids.tolist() == plain.student.ids.tolist()
    assert cross.variants[0].ids.tolist() == read(plain.teachers[1])


def test_stored_and_collated_samples_equal_the_original() -> None:
    """Bugs: the cache or a batch lacks a field; positions in the batch are shifted differently than in the sample."""
    _, _, sample = chat_made(template="{prompt} {hint}", gap_every=1, contrast=True)
    (again,) = decoded(encoded([sample]))
    batch, same = collate([sample, again]), compared(sample).teachers[0]
    for teacher, stored in zip(sample.teachers, again.teachers, strict=True):
        assert (teacher.moved_by, teacher.leakage, len(teacher.variants)) == (
            stored.moved_by,
            stored.leakage,
            len(stored.variants),
        )
        assert [read_.ids.tolist() for read_ in teacher.variants] == [read_.ids.tolist() for read_ in stored.variants]
    rows = batch.teachers[0]
    assert rows.moved is not None
    assert rows.leakage is not None
    assert rows.moved.by.tolist() == [same.moved_by] * 2
    moved = rows.moved.loss_mask[0].nonzero().flatten() + same.moved_by
    assert moved.tolist() == np.flatnonzero(same.tokens.loss_mask).tolist()
    assert rows.student_side(batch.student).loss_mask.equal(rows.moved.loss_mask)
    assert batch.rows(1, 2).teachers[0].variants == ()
    empty = rows.without(rows.moved.by > 0)
    assert empty.tokens.lengths.tolist() == [0, 0]
    assert not empty.student_side(batch.student).loss_mask.any()
    assert empty.leakage is not None
    assert empty.leakage.sum() == 0


def test_a_conversation_without_an_answer_teaches_nothing() -> None:
    student = talking("tagged")
    teacher = of_chats(student, SameTokenizer(), template="{hint}", gap_every=1)
    (teacher_sample,) = ChatSampleMaker(ChatEncoder.of(student, 999, {}), (teacher,))(
        Conversation(TALK[:1], None, FIELDS)
    ).teachers
    assert (teacher_sample.moved_by, teacher_sample.leakage, len(teacher_sample.variants)) == (0, (0, 0), 1)
    assert not teacher_sample.tokens.loss_mask.any()


@pytest.mark.parametrize(
    ("value", "messages"),
    [
        ("What?", [{"role": "user", "content": "What?"}]),
        ('[{"role": "user", "content": "What?"}]', [{"role": "user", "content": "What?"}]),
        ([{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "W"}]}], None),
        ("[1, 2", [{"role": "user", "content": "[1, 2"}]),
    ],
)
def test_a_field_with_the_whole_prompt(value: Any, messages: Any) -> None:
    context = of_chats(talking("tagged"), SameTokenizer(), key="hint").context
    expected = messages or [{"role": "system", "content": "S"}, {"role": "user", "content": "W"}]
    assert context.content(TALK[:1], {FIELD + "hint": value}) == expected


def test_values_are_written() -> None:
    context = of_texts(STUDENT, SameTokenizer(), template="{hint}|{prompt}").context
    for value, text in ((["a", "{b}"], "a\n\n{b}|q"), (3.0, "3|q"), (2.5, "2.5|q"), (True, "True|q")):
        assert context.content("q", {FIELD + "hint": value}) == text


@pytest.mark.parametrize(
    ("teacher", "message"),
    [
        ({"template": "{hint}", "max_length": 3}, r"prompt 6 \(row\), sample 0: teachers.0.context: .* 3 at most"),
        ({"key": "hint"}, "ends with an assistant message"),
    ],
)
def test_records_that_no_prompt_can_be_made_of(teacher: dict[str, Any], message: str) -> None:
    student = talking("tagged")
    rollout = hinted(conversation(student, "It is 42."), '[{"role": "assistant", "content": "No"}]')
    with pytest.raises(DataError, match=message):
        RolloutSampleMaker(pieces_of(student).lengths, (of_chats(student, SameTokenizer(), **teacher),))(rollout)


@given(st.text("ab", max_size=60), st.text("ab", max_size=60), st.text("ab", max_size=30))
@settings(max_examples=60)
def test_leakage_is_what_common_substrings_cover(response: str, context: str, prompt: str) -> None:
    """Bugs: bytes of overlapping substrings count twice; the last substring does not count."""
    covered: set[int] = set()
    for start, stop in ((i, j) for i in range(len(response)) for j in range(i + LEAST, len(response) + 1)):
        part = response[start:stop]
        windows = [part[k : k + LEAST] for k in range(len(part) - LEAST + 1)]
        if part in context and not any(window in prompt for window in windows):
            covered |= set(range(start, stop))
    assert leakage(response, context, prompt) == (len(covered), len(response))


def test_leakage_is_counted_in_bytes() -> None:
    answer = "The answer is 東京タワー."
    assert leakage(answer, f"Solution: {answer}", "q") == (len(answer.encode()),) * 2
    assert leakage(answer, f"Solution: {answer}", answer) == (0, len(answer.encode()))
