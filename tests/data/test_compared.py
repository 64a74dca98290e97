"""Bytes that all models predict: equal for every model, and equal to an oracle over byte offsets."""

from copy import deepcopy
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import Pieces, TokenAligner, pieces_of
from nemo_opd.data.collate import collate, compared
from nemo_opd.data.conversations import ChatSampleMaker
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer, Encoder
from nemo_opd.data.row_types import Conversation
from nemo_opd.data.samples import SameTokenizer, Sample, TeacherSample, Tokens, usable_chunks
from nemo_opd.data.text import TextSampleMaker
from tests.alignment.chat_fixture import small_chat
from tests.tokenizers_fixture import DIGITS_ONE_BY_ONE, byte_level, corpus_texts, real_tokenizer, sentencepiece

REAL = ("llama3_1", "qwen3", "gemma3", "gpt4o")
WITH_TEMPLATES = REAL[:3]
TEXTS = st.text(st.characters(codec="utf-8"), max_size=40)
ODD = st.sampled_from(
    ["e\u0301e\u0301 Å", "<|im_end|>", "\n\n\n x", "123456 is", "  ", "👩‍👩‍👧‍👦", "<think>\nhm\n</think>\n\nSo", "안녕"]
)
MIXED = st.lists(st.one_of(TEXTS, ODD), max_size=4).map(" ".join)


@cache
def pieces(tokenizer: Any) -> Pieces:
    """Cache the pieces: a large tokenizer takes tenths of a second."""
    return pieces_of(tokenizer)


aligner = cache(TokenAligner)


@cache
def text_encoder(tokenizer: Any) -> Encoder:
    return Encoder.of(tokenizer, 10**6, True)


@cache
def chat_encoder(tokenizer: Any) -> ChatEncoder:
    return ChatEncoder.of(tokenizer, 10**6, {})


def text_maker(
    student: Any, teachers: tuple[Any, ...], student_length: int = 10**6, teacher_length: int = 10**6
) -> TextSampleMaker:
    """Return a maker whose last teacher has the student's tokenizer."""
    readers = tuple(
        CrossTokenizer(replace(text_encoder(teacher), max_length=teacher_length), aligner(student, teacher))
        for teacher in teachers
    )
    return TextSampleMaker(replace(text_encoder(student), max_length=student_length), (*readers, SameTokenizer()))


def chat_maker(student: Any, teachers: tuple[Any, ...], length: int = 10**6) -> ChatSampleMaker:
    readers = tuple(
        CrossTokenizer(replace(chat_encoder(teacher), max_length=length), aligner(student, teacher))
        for teacher in teachers
    )
    return ChatSampleMaker(replace(chat_encoder(student), max_length=length), (*readers, SameTokenizer()))


def sides(sample: Sample) -> list[Tokens]:
    return [sample.student, *(teacher.tokens for teacher in sample.teachers)]


def assert_equal_bytes(sample: Sample, tokenizers: list[Any]) -> bytes:
    """Check that the compared bytes are whole tokens with a loss and equal for all models; return the bytes."""
    counted = []
    for tokens, tokenizer in zip(sides(compared(sample)), tokenizers, strict=True):
        spelled, is_counted = pieces(tokenizer), tokens.num_bytes > 0
        assert not (is_counted & ~tokens.loss_mask).any()
        assert (tokens.num_bytes[is_counted] == spelled.lengths[tokens.ids[is_counted]]).all()
        counted.append(b"".join(map(spelled.bytes_of, tokens.ids[is_counted].tolist())))
    assert len(set(counted)) == 1
    return counted[0]


@cache
def llama_that_thinks() -> Any:
    """Return Llama 3.1's tokenizer with special tokens that are text to Qwen3."""
    tokenizer = deepcopy(real_tokenizer("llama3_1"))
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    return tokenizer


@pytest.mark.tokenizers
@pytest.mark.parametrize("student", ["llama3_1", "qwen3", "llama_that_thinks"])
@settings(max_examples=12, deadline=None)
@given(MIXED, st.integers(2, 60), st.integers(2, 60))
def test_a_text_has_as_many_bytes_for_every_model(student: str, text: str, length: int, teacher_length: int) -> None:
    """Catches a first token that only some models predict, cuts, and text that a tokenizer rewrites."""
    teachers = [name for name in (*REAL, "llama_that_thinks") if name != student]
    tokenizers = [
        llama_that_thinks() if name == "llama_that_thinks" else real_tokenizer(name)
        for name in (student, *teachers, student)
    ]
    sample = text_maker(tokenizers[0], tuple(tokenizers[1:-1]), length, teacher_length)(text)
    assert_equal_bytes(sample, tokenizers)


@pytest.mark.tokenizers
@pytest.mark.parametrize("is_swapped", [False, True])
def test_a_mark_that_is_special_on_one_side_has_no_bytes(is_swapped: bool) -> None:
    """Bug: `<think>` counts 7 bytes for Qwen3, and 0 for a tokenizer that has it as a special token."""
    student, teacher = real_tokenizer("qwen3"), llama_that_thinks()
    if is_swapped:
        student, teacher = teacher, student
    tokenizers = [student, teacher, student]
    sample = text_maker(student, (teacher,))("Question: 2+2? <think>It is four</think> The answer is 4.")
    assert assert_equal_bytes(sample, tokenizers) == b": 2+2? It is four The answer is 4."
    # Still compared: both learn to think.
    chunks = sample.teachers[0].chunks
    assert chunks is not None
    assert len(set(chunks.student.tolist()) & set(chunks.marks.tolist())) == 3


@pytest.mark.parametrize("spelling", ["[MARK]", "<a mark>"])
def test_marks_of_one_role_have_no_bytes(spelling: str) -> None:
    """Bug: marks with a common role count as text, with equal or different lengths."""
    student, teacher = deepcopy(byte_level(610)), deepcopy(byte_level(455))
    student.add_tokens(["<mark>"])
    teacher.add_tokens([spelling])
    roles = {"<mark>": "think_start", spelling: "think_start"}
    texts = "The <mark>quick fox", f"The {spelling}quick fox"
    sides = []
    for tokenizer, text in zip((student, teacher), texts, strict=True):
        ids = np.array(tokenizer(text)["input_ids"], np.int32)
        sides.append(Tokens(ids, np.arange(len(ids)) > 0, pieces(tokenizer).lengths[ids]))
    alignment = TokenAligner(student, teacher, roles=roles).align(sides[0].ids, sides[1].ids)
    assert alignment.special.sum() == 1
    sample = Sample(sides[0], (TeacherSample(sides[1], usable_chunks(alignment, *sides, "text")),))
    assert assert_equal_bytes(sample, [student, teacher]).endswith(b"quick fox")


@pytest.mark.tokenizers
@pytest.mark.parametrize("student", ["llama3_1", "qwen3"])
@settings(max_examples=6, deadline=None)
@given(st.lists(MIXED, min_size=1, max_size=3), st.integers(10, 120))
def test_a_conversation_has_as_many_bytes_for_every_model(student: str, contents: list[str], length: int) -> None:
    """Catches thinking tags that only one template writes, and contents that a template drops or trims."""
    messages = [{"role": ("user", "assistant")[k % 2], "content": text} for k, text in enumerate(["Hi", *contents])]
    teachers = [name for name in WITH_TEMPLATES if name != student]
    tokenizers = [real_tokenizer(name) for name in (student, *teachers, student)]
    sample = chat_maker(tokenizers[0], tuple(tokenizers[1:-1]), length)(Conversation(messages))
    counted = assert_equal_bytes(sample, tokenizers)
    assert "<think>" in str(messages) or b"<think>" not in counted


@pytest.mark.tokenizers
def test_the_bytes_of_known_texts() -> None:
    """Catches bytes that some model cannot predict: Qwen3 and GPT-4o have no BOS, Llama and Gemma have one."""
    tokenizers = [real_tokenizer(name) for name in ("llama3_1", "qwen3", "llama3_1")]
    maker = text_maker(tokenizers[0], (tokenizers[1],))
    assert assert_equal_bytes(maker("The quick brown fox."), tokenizers) == b" quick brown fox."
    # For Qwen3, `1` has no predictor, and it lies inside Llama's `123`.
    assert assert_equal_bytes(maker("123456 is a number"), tokenizers) == b"456 is a number"
    assert assert_equal_bytes(maker("It is a cafe\u0301 here"), tokenizers) == b" is a here"
    # Without a second tokenizer, the first word stays: BOS predicts it.
    alone = TextSampleMaker(maker.student, (SameTokenizer(),))
    assert assert_equal_bytes(alone("The quick brown fox."), tokenizers[::2]) == b"The quick brown fox."


@pytest.mark.tokenizers
@pytest.mark.parametrize("length", [40, 10**6])
def test_the_students_bytes_do_not_depend_on_teachers(length: int) -> None:
    """Bug: val/bits_per_byte of one student was 1.4196 with a teacher and 1.4099 without, over other bytes."""
    student, teacher = real_tokenizer("llama3_1"), real_tokenizer("qwen3")
    texts = [*(text[:2000] for text in corpus_texts()[::20]), "123456 is a number", "It is a cafe\u0301 here"]
    alone_maker = TextSampleMaker(replace(text_encoder(student), max_length=length), ())
    alone = collate(list(map(alone_maker, texts)))
    taught = collate(list(map(text_maker(student, (teacher,), length, 30), texts)))
    for name in ("ids", "lengths", "loss_mask", "num_bytes"):
        assert torch.equal(getattr(alone.student, name), getattr(taught.student, name)), name
    cut = [text_encoder(student)(text).cut(length) for text in texts]
    assert int((taught.student.num_bytes * taught.student.loss_mask).sum()) == sum(
        int(encoding.ends[-1]) for encoding in cut
    )
    assert taught.shared_bytes is not None
    assert int(taught.shared_bytes.sum()) < int(taught.student.num_bytes.sum())


@pytest.mark.tokenizers
def test_bytes_of_a_corpus_are_almost_all_of_it() -> None:
    """Catches long stretches that are dropped for one token."""
    tokenizers = [real_tokenizer(name) for name in (*REAL, "llama3_1")]
    maker = text_maker(tokenizers[0], tuple(tokenizers[1:-1]))
    texts = [text[:2000] for text in corpus_texts()[::6]]
    counted = sum(len(assert_equal_bytes(maker(text), tokenizers)) for text in texts)
    assert counted > 0.98 * sum(len(text.encode()) for text in texts)


def small_sample(text: str, route: int | None = None) -> tuple[Sample, list[Any]]:
    """Return a sample of a byte-level student, a SentencePiece teacher with BOS and a byte-level teacher without."""
    with_bos, without_bos = sentencepiece(), byte_level(455, DIGITS_ONE_BY_ONE, "<|im_end|>", ("<|endoftext|>",))
    student = byte_level(610)
    sample = text_maker(student, (with_bos, without_bos))(text)
    return Sample(sample.student, sample.teachers, route), [student, with_bos, without_bos, student]


@settings(max_examples=50)
@given(TEXTS)
def test_stretches_end_where_all_models_cut(text: str) -> None:
    """Compare with an oracle: bytes between common token ends, if every model predicts all of them."""
    sample, tokenizers = small_sample(text)
    tokens = sides(sample)
    if len({b"".join(map(pieces(t).bytes_of, s.ids.tolist())) for s, t in zip(tokens, tokenizers, strict=True)}) > 1:
        return  # a side reads other bytes
    ends = [np.cumsum(side.num_bytes) for side in tokens]
    common = sorted(set.intersection(*({0, *side.tolist()} for side in ends)))
    expected = 0
    for start, stop in pairwise(common):
        inside = [(side > start) & (side <= stop) & (s.num_bytes > 0) for side, s in zip(ends, tokens, strict=True)]
        if all(side.loss_mask[where].all() for side, where in zip(tokens, inside, strict=True)):
            expected += stop - start
    assert int(compared(sample).student.num_bytes.sum()) == expected


def test_a_routed_text_is_compared_with_its_own_teacher_alone() -> None:
    """Catches bytes that are excluded for a teacher that does not read the text."""
    text = "The quick brown fox"
    counts = {route: int(compared(small_sample(text, route)[0]).student.num_bytes.sum()) for route in (None, 0, 1, 2)}
    # Neither does the student predict `The`: its tokenizer has no BOS.
    assert counts[2] == len(text) - 3
    assert counts[None] == min(counts.values())
    rows = collate([small_sample(text, 1)[0]])
    assert rows.shared_bytes is not None
    assert rows.teachers[1].tokens.num_bytes.sum() == rows.shared_bytes.sum() == counts[1]
    assert not rows.teachers[0].tokens.num_bytes.any()


def test_a_teacher_without_a_token_leaves_its_bytes_out_on_all_sides() -> None:
    sample, _ = small_sample("The quick brown fox")
    mask = sample.student.loss_mask.copy()
    mask[2] = False
    lacking = Tokens(sample.student.ids, mask, sample.student.num_bytes)
    teachers = (*sample.teachers[:2], type(sample.teachers[2])(lacking, None))
    counted = compared(Sample(sample.student, teachers))
    assert not counted.student.num_bytes[2]
    assert len({int(side.num_bytes.sum()) for side in sides(counted)}) == 1


def test_template_text_has_no_bytes() -> None:
    """Bug: with a single tokenizer, bits per byte included the template's text."""
    tokenizer = small_chat("plain")
    maker = ChatSampleMaker(ChatEncoder.of(tokenizer, 99, {}), (SameTokenizer(),))
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "The dog"}]
    assert assert_equal_bytes(maker(Conversation(messages)), [tokenizer] * 2) == b"The dog"
