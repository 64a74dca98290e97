"""Windows cover a text completely, do not depend on teachers, and each is like a text."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.data.encoders import CrossTokenizer, Encoder
from nemo_opd.data.samples import SameTokenizer, Sample, decoded, encoded
from nemo_opd.data.text import TextSampleMaker, TextWindowMaker
from tests.data.conftest import MakeTokenizer, byte_bpe
from tests.data.test_cache import arrays
from tests.tokenizers_fixture import corpus_texts, real_tokenizer

BOS, EOS = 0, 1
LONG = 10**6
COARSE, FINE = byte_bpe(46), byte_bpe(8)
texts = st.text(st.sampled_from("the cat sat on mat,東京ïß1 34\n"), min_size=1, max_size=120)


def maker(student: Any, teachers: list[Any], limits: list[int]) -> TextSampleMaker:
    student_limit, *teacher_limits = limits
    crossing = [
        CrossTokenizer(Encoder.of(teacher, limit, True), TokenAligner(student, teacher))
        for teacher, limit in zip(teachers, teacher_limits, strict=True)
    ]
    return TextSampleMaker(Encoder.of(student, student_limit, True), (*crossing, SameTokenizer()))


def sides(sample: Sample) -> list[list[int]]:
    """Return the ids of the student and of the cross-tokenizer teachers."""
    crossing = [teacher.tokens for teacher in sample.teachers if teacher.chunks is not None]
    return [tokens.ids.tolist() for tokens in (sample.student, *crossing)]


def bytes_of(tokenizer: Any, ids: list[int]) -> bytes:
    pieces = pieces_of(tokenizer)
    return b"".join(map(pieces.bytes_of, ids))


@settings(max_examples=150)
@given(texts, st.integers(6, 40), st.booleans())
def test_windows_are_all_of_a_text(text: str, limit: int, swap: bool) -> None:
    """Bugs: a token in no window; bytes that a teacher reads in another window; an EOS in the middle."""
    student, teacher = (FINE, COARSE) if swap else (COARSE, FINE)
    windows = TextWindowMaker(maker(student, [teacher], [limit, LONG]))(text)

    parts = [sides(window)[0] for window in windows]
    assert all(part[0] == BOS and len(part) <= limit for part in parts)
    whole_ids = maker(student, [teacher], [LONG, LONG])(text).student.ids.tolist()
    assert [*parts[0], *(token for part in parts[1:] for token in part[1:])] == whole_ids
    for k, window in enumerate(windows):
        ours, theirs = sides(window)
        assert bytes_of(student, ours) == bytes_of(teacher, theirs)
        assert (theirs[0], theirs[-1] == EOS, EOS in theirs[:-1]) == (BOS, k == len(windows) - 1, False)
        assert window.teachers[1].tokens is window.student
        assert not window.student.loss_mask[0]
        assert window.student.loss_mask[1:].all()
        chunks = window.teachers[0].chunks
        assert chunks is not None
        assert (chunks.student >= 0)[1:].all(), "all of a window is compared"


def test_teachers_do_not_change_the_windows() -> None:
    """Bug: windows at boundaries of all tokenizers and within every model's limit gave runs with and without a teacher
    different sequences."""
    text = "the cat sat on mat,東京ïß1 34\n" * 12
    alone = TextWindowMaker(TextSampleMaker(Encoder.of(COARSE, 9, True), ()))(text)
    for limit in (5, 12, LONG):
        taught = TextWindowMaker(maker(COARSE, [FINE], [9, limit]))(text)
        assert [arrays(Sample(window.student, ())) for window in taught] == [arrays(window) for window in alone]
        assert max(len(window.teachers[0].tokens) for window in taught) <= limit


def test_a_text_that_fits_is_one_window_and_the_sample_of_the_text() -> None:
    text = "the cat sat on the naïve mat"
    make = maker(COARSE, [FINE], [100, 200])
    (window,) = TextWindowMaker(make)(text)
    assert arrays(window) == arrays(make(text))
    assert TextWindowMaker(make).identity != make.identity


def test_without_a_first_token_of_their_own_windows_begin_with_the_text(make_tokenizer: MakeTokenizer) -> None:
    """Catches a loss on the first token of a window, which has no predictor without BOS."""
    plain = make_tokenizer(40, bos=False)
    text = "the cat sat on the mat, the cat sat"
    whole_ids = [*plain(text)["input_ids"], EOS]
    windows = TextWindowMaker(TextSampleMaker(Encoder.of(plain, 5, True), (SameTokenizer(),)))(text)
    assert [len(window.student) for window in windows[:-1]] == [5] * (len(whole_ids) // 5)
    assert [token for window in windows for token in window.student.ids.tolist()] == whole_ids
    assert not any(window.student.loss_mask[0] for window in windows)


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
@pytest.mark.parametrize("student", ["gemma3", "llama3_1", "qwen3"])
def test_windows_of_real_texts_for_three_tokenizers(student: str) -> None:
    """Bugs: windows that depend on teachers; a teacher starts a window elsewhere than the student, so that none of its
    chunks has an equal history."""
    names = [name for name in ("gemma3", "llama3_1", "qwen3") if name != student]
    teachers = [real_tokenizer(name) for name in names]
    windows_of = TextWindowMaker(maker(real_tokenizer(student), teachers, [60, LONG, LONG]))
    alone = TextWindowMaker(TextSampleMaker(windows_of.make.student, ()))
    compared, scored = 0, 0
    for text in corpus_texts()[::40]:
        windows = windows_of(text[:8000])
        assert [w.student.ids.tolist() for w in windows] == [w.student.ids.tolist() for w in alone(text[:8000])]
        scored += sum(int(window.student.loss_mask.sum()) for window in windows)
        for window in windows:
            chunks = window.teachers[0].chunks
            assert chunks is not None
            compared += int((chunks.compared[0] >= 0).sum())
    assert compared > 0.97 * scored


@pytest.mark.tokenizers
@pytest.mark.parametrize(("name", "number"), [("llama3_1", 1), ("qwen3", 0), ("gemma3", 1), ("gpt4o", 0)])
def test_a_window_opens_as_a_text_does(name: str, number: int) -> None:
    opening = Encoder.of(real_tokenizer(name), 100, True).opening
    assert len(opening.ids) == number
    assert np.array_equal(opening.ends, np.zeros(number, np.int64))
