"""Samples of the beginning of a text against those of the whole text, token for token."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any
from unicodedata import is_normalized

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.data import encoders
from nemo_opd.data import text as text_module
from nemo_opd.data.encoders import EDGE, MARGIN, Encoder, Encoding, encode_beginning, is_seam
from nemo_opd.data.samples import Sample
from nemo_opd.data.text import CrossTokenizer, TextSampleMaker
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
    """A few kinds of runs, repeated: with few kinds, boundaries that a tokenizer may rely on are far away."""
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


def assert_same(names: Sequence[str], text: str, length: int) -> None:
    """The student's tokens as many as a sample has; of every teacher those that start up to EDGE after the cut."""
    student, *teachers = map(encoder, names)
    read = encode_beginning(student, teachers, text, length)
    expected, starts = student.located(text)
    assert read[0].ids[:length].tolist() == expected.ids[:length].tolist()
    assert (len(read[0].ids) > length) == (len(expected.ids) > length)
    stop = starts[length] + EDGE if length < len(starts) else len(text)
    for teacher, found in zip(teachers, read[1:], strict=True):
        encoding, starts = teacher.located(text)
        kept = int(np.searchsorted(starts, stop, "right"))
        assert found.ids.tolist() == encoding.ids[:kept].tolist()


lengths = st.sampled_from((1, 3, 17, 64))


@pytest.mark.parametrize("family", REAL)
@settings(max_examples=20)
@given(text=long_texts(WORDS + MARKS), length=lengths)
def test_tokens_are_those_of_the_whole_text(family: str, text: str, length: int) -> None:
    assert_same((family, *(name for name in REAL if name != family)), text, length)


@pytest.mark.parametrize("kind", SMALL)
@settings(max_examples=20)
@given(text=long_texts(WORDS), length=lengths)
def test_tokens_of_small_tokenizers_are_those_of_the_whole_text(kind: str, text: str, length: int) -> None:
    """Byte-level BPE, SentencePiece's BPE and unigram models, with digits grouped from either end."""
    assert_same((kind, "byte_level"), text, length)


def whole(student: Encoder, teachers: Sequence[Encoder], text: str, length: int) -> list[Encoding]:
    return [encode(text) for encode in (student, *teachers)]


def flat(sample: Sample) -> list[object]:
    """All that a batch takes of it."""
    sides: list[object] = [sample.student.ids.tolist(), sample.student.num_bytes.tolist()]
    for teacher in sample.teachers:
        assert teacher.chunks is not None
        sides += [teacher.tokens.ids.tolist(), *(ids.tolist() for ids in teacher.chunks.compared)]
    return sides


@pytest.mark.parametrize("family", REAL)
@settings(max_examples=8)
@given(text=long_texts(WORDS + MARKS), length=lengths)
def test_samples_are_those_of_the_whole_text(family: str, text: str, length: int) -> None:
    """With every other family as a teacher."""
    readers = tuple(CrossTokenizer(encoder(name), aligner(family, name)) for name in REAL if name != family)
    make = TextSampleMaker(replace(encoder(family), max_length=length), readers)
    bounded = flat(make(text))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoders, "MARGIN", 10**9)
        assert bounded == flat(make(text)), "with all of it tokenized"
        if is_normalized("NFC", text) and not any(mark in text for mark in MARKS):
            patch.setattr(text_module, "encode_beginning", whole)
            assert bounded == flat(make(text)), "with all of it aligned"


def test_a_run_is_read_to_its_end() -> None:
    """Digits that are grouped from their end: bug: those far behind what was read decide on the first group."""
    for number in (MARGIN * 4, MARGIN * 4 + 1, MARGIN * 4 + 2):
        assert_same(("digits_from_the_end",), "a " + "2024" * number + " fox " * 5_000, 5)


def test_merges_that_reach_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain whose pairs are merged from its end; bug: its last character decides on the first."""
    symbols = [chr(code) for code in (*range(0x2200, 0x2400), *range(0x2500, 0x2700), *range(0x1F300, 0x1F600))]
    chain = [character for i, symbol in enumerate(symbols) for character in (chr(0x4E00 + i), symbol)]
    pairs = list(pairwise(chain))
    vocab = ["<unk>", "▁", "x", *chain, *("".join(pair) for pair in pairs)]
    model = models.BPE({piece: i for i, piece in enumerate(vocab)}, pairs[::-1], unk_token="<unk>")
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    monkeypatch.setitem(SMALL, "chain", lambda: PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>"))
    for number in (len(chain), len(chain) - 1):
        assert_same(("chain",), "x" + "".join(chain[:number]) + "x" * 20_000, 5)
        encoder.cache_clear()


def test_what_is_read_does_not_grow_with_the_text() -> None:
    prose = "The quick brown fox jumps over the lazy dog. "
    read = [len(encode_beginning(encoder("byte_level"), [], prose * number, 50)[0].ids) for number in (1_000, 30_000)]
    assert read[0] == read[1] < 2_000
    unbroken = encode_beginning(encoder("byte_level"), [], "A" * 20_000, 50)[0]
    assert len(unbroken.ids) == len(encoder("byte_level")("A" * 20_000).ids), "there is no seam"


def test_no_token_spans_a_seam() -> None:
    """Against all tokens, one by one, at every place of a text."""
    tokenizer = byte_level()
    pieces = pieces_of(tokenizer)
    ids = encoder("byte_level")("The dog's 東京 2024  year<|eot_id|>Größe, größer ").ids
    spelled = [pieces.bytes_of(int(i)) for i in ids]
    for i in range(1, len(ids)):
        left = b"".join(spelled[:i]).rpartition(b"\0")[2] if spelled[i - 1] else b""
        right = b"".join(spelled[i:])
        if not spelled[i - 1] or not spelled[i]:
            assert not is_seam(pieces, ids, i)
            continue
        spans = any(
            left.endswith(piece[:cut]) and right.startswith(piece[cut:])
            for piece in set(pieces.as_list())
            for cut in range(1, len(piece))
        )
        assert is_seam(pieces, ids, i) == (not spans)
