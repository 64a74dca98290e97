"""Samples of a text's beginning equal samples of the whole text, token for token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any
from unicodedata import is_normalized

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import TokenAligner
from nemo_opd.data import text as text_module
from nemo_opd.data.encoders import CrossTokenizer, Encoder, Encoding, encode_beginning
from nemo_opd.data.samples import Sample
from nemo_opd.data.text import TextSampleMaker
from tests.tokenizers_fixture import REAL, byte_level, real_tokenizer, sentencepiece, unigram

pytestmark = pytest.mark.tokenizers

DIGITS_FROM_THE_END = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))| ?[^\s\p{L}\p{N}]+| ?\p{L}+|\s+"
SMALL: dict[str, Callable[[], Any]] = {
    "byte_level": byte_level,
    "digits_from_the_end": lambda: byte_level(1200, DIGITS_FROM_THE_END),
    "composed": lambda: byte_level(600, nfc=True),
    "sentencepiece": sentencepiece,
    "unigram": unigram,
}
WORDS = (
    "the ", " quick", "fox", "  ", "\n", "\n\n\n", " " * 300, "\t", "\r\n", "\u3000", "\u200b", "a", "ABC", "aB", "_",
    "1", "12345", "3.14", "9" * 200, "'s", "!!!", "----", "// ", "def f(x):\n        return x\n", "Größe", "東京",
    "タワー", "。", "ไทยภาษา", "한국어", "\u00e9", "e\u0301", "\u0301" * 5, "👩‍👩‍👧‍👦", "🏳️‍🌈", "ACGTTGCA",
)  # fmt: skip
MARKS = ("<|endoftext|>", "<eos>", "<|im_start|>", "<pad>")


@st.composite
def long_texts(draw: st.DrawFn, atoms: Sequence[str]) -> str:
    """Draw texts of a few repeated atoms, so that boundaries that a tokenizer may rely on are far apart."""
    pool = draw(st.lists(st.sampled_from(atoms), min_size=1, max_size=8))
    order = draw(st.randoms(use_true_random=False))
    length = draw(st.integers(2_500, 8_000))
    text = ""
    while len(text) < length:
        text += order.choice(pool) * order.choice((1, 1, 2, 30))
    return text


@cache
def encoder(name: str) -> Encoder:
    return Encoder.of(SMALL[name]() if name in SMALL else real_tokenizer(name), 10**6, append_eos=True)


@cache
def aligner(student: str, teacher: str) -> TokenAligner:
    return TokenAligner(encoder(student).tokenizer, encoder(teacher).tokenizer)


lengths = st.sampled_from((1, 3, 17, 64))


def assert_same(names: Sequence[str], text: str, length: int) -> None:
    """Compare a sample's student tokens, and the teachers' tokens of the same text."""
    student, *teachers = map(encoder, names)
    read = encode_beginning(student, teachers, text, length)
    expected, starts = student.located(text)
    assert read[0].ids[:length].tolist() == expected.ids[:length].tolist()
    assert (len(read[0].ids) > length) == (len(expected.ids) > length)
    stop = starts[length] if length < len(starts) else len(text)
    for teacher, encoding in zip(teachers, read[1:], strict=True):
        expected, starts = teacher.located(text)
        num_tokens = int((starts <= stop).sum())
        assert encoding.ids[:num_tokens].tolist() == expected.ids[:num_tokens].tolist()


@pytest.mark.parametrize("family", REAL)
@settings(max_examples=20)
@given(text=long_texts(WORDS + MARKS), length=lengths)
def test_tokens_are_those_of_the_whole_text(family: str, text: str, length: int) -> None:
    """Bug: a different cut of the text changes a token of the sample."""
    assert_same((family, *(name for name in REAL if name != family)), text, length)


@pytest.mark.parametrize("kind", SMALL)
@settings(max_examples=20)
@given(text=long_texts(WORDS), length=lengths)
def test_tokens_of_small_tokenizers_are_those_of_the_whole_text(kind: str, text: str, length: int) -> None:
    """The same for byte-level BPE, SentencePiece's BPE and unigram models, with digits grouped from either end."""
    assert_same((kind, "byte_level"), text, length)


def test_groups_of_digits_that_end_far_away() -> None:
    """Bug: digits grouped from the end depend on the cut within a long run of digits."""
    assert_same(("digits_from_the_end", "byte_level"), "12345" * 600, 1)


def encode_whole(student: Encoder, teachers: Sequence[Encoder], text: str, length: int) -> list[Encoding]:
    return [encode(text) for encode in (student, *teachers)]


def flat(sample: Sample) -> list[object]:
    """Return the values that a batch takes from a sample."""
    sides: list[object] = [sample.student.ids.tolist(), sample.student.num_bytes.tolist()]
    for teacher in sample.teachers:
        assert teacher.chunks is not None
        sides += [teacher.tokens.ids.tolist(), *(ids.tolist() for ids in teacher.chunks.compared)]
    return sides


@pytest.mark.parametrize("family", REAL)
@settings(max_examples=8)
@given(text=long_texts(WORDS + MARKS), length=lengths)
def test_samples_are_those_of_the_whole_text(family: str, text: str, length: int) -> None:
    """The same with chunks, and every other family as a teacher."""
    readers = tuple(CrossTokenizer(encoder(name), aligner(family, name)) for name in REAL if name != family)
    make = TextSampleMaker(replace(encoder(family), max_length=length), readers)
    bounded = flat(make(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "encode_beginning", encode_whole)
        if is_normalized("NFC", text) and not any(mark in text for mark in MARKS):
            assert bounded == flat(make(text))


def test_the_read_part_does_not_grow_with_the_text() -> None:
    """Bug: a text of 30 MB is tokenized completely for its first 50 tokens."""
    sides = encoder("byte_level"), [encoder("sentencepiece")]
    for atom in ("The quick brown fox jumps over the lazy dog. ", "A", "東京"):
        read = [[len(side.ids) for side in encode_beginning(*sides, atom * n, 50)] for n in (20_000, 600_000)]
        assert read[0] == read[1]
        assert max(read[0]) < 20_000


def test_tokens_longer_than_estimated() -> None:
    """Bug: if the first attempt has too few tokens, the sample ends there, or has an EOS in the middle."""
    text = (" " * 300 + "fox") * 500
    assert_same(("byte_level", "sentencepiece"), text, 200)
