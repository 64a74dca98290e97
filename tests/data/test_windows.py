"""Windows of a text: all of it, on all sides, each a text of its own."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import TokenAligner
from nemo_opd.data.encoders import Encoder
from nemo_opd.data.samples import SameTokenizer, Sample, decoded, encoded
from nemo_opd.data.text import CrossTokenizer, TextSampleMaker, TextWindowMaker
from tests.data.conftest import MakeTokenizer, byte_bpe
from tests.data.test_cache import arrays
from tests.tokenizers_fixture import corpus_texts, real_tokenizer

BOS, EOS = 0, 1
LONG = 10**6
COARSE, FINE = byte_bpe(46), byte_bpe(8)
texts = st.text(st.sampled_from("the cat sat on mat,東京ïß1 34\n"), min_size=1, max_size=120)


def maker(student: Any, teachers: list[Any], limits: list[int]) -> TextSampleMaker:
    own, *others = limits
    crossing = [
        CrossTokenizer(Encoder.of(teacher, limit, True), TokenAligner(student, teacher))
        for teacher, limit in zip(teachers, others, strict=True)
    ]
    return TextSampleMaker(Encoder.of(student, own, True), (*crossing, SameTokenizer()))


def sides(sample: Sample) -> list[list[int]]:
    """Ids of the student and of the teachers with another tokenizer."""
    crossing = [teacher.tokens for teacher in sample.teachers if teacher.chunks is not None]
    return [tokens.ids.tolist() for tokens in (sample.student, *crossing)]


def num_chunks(sample: Sample) -> int:
    chunks = sample.teachers[0].chunks
    assert chunks is not None
    return len(set(chunks.student[chunks.student >= 0].tolist()))


@settings(max_examples=150)
@given(texts, st.integers(6, 40), st.integers(6, 40), st.booleans())
def test_windows_are_all_of_a_text(text: str, student_limit: int, teacher_limit: int, swap: bool) -> None:
    """Bugs: tokens that no window has, a chunk in two windows, an end of sequence in the middle."""
    student, teacher = (FINE, COARSE) if swap else (COARSE, FINE)
    limits = [student_limit, teacher_limit]
    whole = maker(student, [teacher], [LONG, LONG])(text)

    windows = TextWindowMaker(maker(student, [teacher], limits))(text)

    for side, (ids, limit) in enumerate(zip(sides(whole), limits, strict=True)):
        parts = [sides(window)[side] for window in windows]
        assert all(part[0] == BOS and len(part) <= limit for part in parts)
        assert [*parts[0], *(token for part in parts[1:] for token in part[1:])] == ids
        assert all(EOS not in part for part in parts[:-1])
    assert sum(map(num_chunks, windows)) == num_chunks(whole), "each chunk is learned from in one window"
    for window in windows:
        (cross, same) = window.teachers
        assert same.tokens is window.student
        bytes_of = [int(tokens.num_bytes.sum()) for tokens in (window.student, cross.tokens)]
        assert bytes_of[0] == bytes_of[1]
        assert not window.student.loss_mask[0]
        assert window.student.loss_mask[1:].all()


def test_a_text_that_fits_is_one_window_and_the_sample_of_the_text() -> None:
    text = "the cat sat on the naïve mat"
    make = maker(COARSE, [FINE], [100, 200])
    (window,) = TextWindowMaker(make)(text)
    assert arrays(window) == arrays(make(text))
    assert TextWindowMaker(make).identity != make.identity


def test_without_a_first_token_of_their_own_windows_begin_with_the_text(make_tokenizer: MakeTokenizer) -> None:
    """The first token of a window is then no target."""
    plain = make_tokenizer(40, bos=False)
    text = "the cat sat on the mat, the cat sat"
    whole = [*plain(text)["input_ids"], EOS]
    windows = TextWindowMaker(TextSampleMaker(Encoder.of(plain, 5, True), (SameTokenizer(),)))(text)
    assert [len(window.student) for window in windows[:-1]] == [5] * (len(whole) // 5)
    assert [token for window in windows for token in window.student.ids.tolist()] == whole
    assert not any(window.student.loss_mask[0] for window in windows)


@pytest.mark.tokenizers
def test_what_has_no_common_token_within_a_window_is_read_whole() -> None:
    """Two tokenizers may never begin a token at the same place of a long rule."""
    text = "=-" * 3000
    student, teacher = real_tokenizer("llama3_1"), real_tokenizer("gemma3")
    whole = maker(student, [teacher], [LONG, LONG])(text)
    windows = TextWindowMaker(maker(student, [teacher], [9, 7]))(text)
    assert num_chunks(whole) < len(windows)
    for side, limit in enumerate((9, 7)):
        parts = [sides(window)[side] for window in windows]
        assert max(map(len, parts)) <= limit
        assert [*parts[0], *(token for part in parts[1:] for token in part[1:])] == sides(whole)[side]


@pytest.mark.parametrize("text", ["", " ", "t"])
def test_a_short_text_is_a_window_too(text: str) -> None:
    (window,) = TextWindowMaker(maker(COARSE, [FINE], [3, 3]))(text)
    assert window.student.ids[0] == BOS


def test_stored_windows_are_the_made_ones() -> None:
    windows = TextWindowMaker(maker(COARSE, [FINE], [8, 9]))("the cat sat on the mat " * 30)
    again = decoded(encoded(windows))
    assert len(windows) > 10
    assert [arrays(sample) for sample in again] == [arrays(sample) for sample in windows]
    assert all(sample.teachers[1].tokens is sample.student for sample in again)


@pytest.mark.tokenizers
def test_windows_of_real_texts_for_three_tokenizers() -> None:
    student, names = "gemma3", ("llama3_1", "qwen3")
    teachers = [real_tokenizer(name) for name in names]
    limits = [60, 70, 80]
    windows_of = TextWindowMaker(maker(real_tokenizer(student), teachers, limits))
    make = maker(real_tokenizer(student), teachers, [LONG] * 3)
    for text in corpus_texts()[::40]:
        whole, windows = make(text), windows_of(text)
        assert len(windows) >= len(whole.student) / limits[0]
        for side, limit in enumerate(limits):
            parts = [sides(window)[side] for window in windows]
            opening = opening_of(windows_of, side)
            assert max(map(len, parts)) <= limit
            assert [*parts[0], *(token for part in parts[1:] for token in part[opening:])] == sides(whole)[side]
        read = [num_chunks(window) for window in windows]
        assert num_chunks(whole) - len(windows) <= sum(read) <= num_chunks(whole)


def opening_of(windows: TextWindowMaker, side: int) -> int:
    encoders = [windows.make.student, *(teacher.encoder for teacher in windows.make.crossing)]
    return len(encoders[side].opening.ids)


@pytest.mark.tokenizers
@pytest.mark.parametrize(("name", "number"), [("llama3_1", 1), ("qwen3", 0), ("gemma3", 1), ("gpt4o", 0)])
def test_a_window_opens_as_a_text_does(name: str, number: int) -> None:
    opening = Encoder.of(real_tokenizer(name), 100, True).opening
    assert len(opening.ids) == number
    assert np.array_equal(opening.ends, np.zeros(number, np.int64))
