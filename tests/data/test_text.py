"""Samples against an oracle on byte strings instead of cumulative lengths."""

import pickle
import unicodedata
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import processors

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.alignment.pieces import byte_level_bytes
from nemo_opd.data.encoders import CrossTokenizer, Encoder, encode_beginning
from nemo_opd.data.samples import SameTokenizer, Sample, Tokens, decoded, encoded, usable_chunks
from nemo_opd.data.text import TextSampleMaker
from nemo_opd.types import Alignment
from tests.tokenizers_fixture import byte_level

BOS, EOS = 0, 1
TEXT = "the cat sat on the naïve mat, 東京タワー 345 the end of the cat"


def maker(
    student: Any, teacher: Any, student_length: int, teacher_length: int, append_eos: bool = True
) -> TextSampleMaker:
    cross = CrossTokenizer(Encoder.of(teacher, teacher_length, append_eos), TokenAligner(student, teacher))
    return TextSampleMaker(Encoder.of(student, student_length, append_eos), (cross, SameTokenizer()))


def piece(tokenizer: Any, token_id: int) -> bytes:
    return b"" if token_id in (BOS, EOS) else byte_level_bytes(tokenizer.convert_ids_to_tokens(token_id))


def whole_ids(tokenizer: Any, text: str, append_eos: bool) -> list[int]:
    ids = tokenizer.backend_tokenizer.encode(text).ids
    return [*ids, EOS] if append_eos else ids


def assert_tokens(tokens: Tokens, ids: list[int], tokenizer: Any) -> None:
    assert tokens.ids.tolist() == ids
    assert tokens.num_bytes.tolist() == [len(piece(tokenizer, i)) for i in ids]
    assert tokens.loss_mask.tolist() == [position > 0 for position in range(len(ids))]


texts = st.text(st.sampled_from("the cat sat on mat,東京ïß1 34\n"), max_size=60)


@settings(max_examples=150)
@given(texts, st.integers(2, 40), st.integers(2, 80), st.booleans(), st.booleans())
def test_truncation(
    coarse: Any, fine: Any, text: str, student_length: int, teacher_length: int, append_eos: bool, swap: bool
) -> None:
    """Catches an EOS behind a cut document, teacher tokens beyond a cut student, and teachers cut without need.

    A cut student ends its teacher at the last token end that both have.
    """
    student, teacher = (fine, coarse) if swap else (coarse, fine)
    sample = maker(student, teacher, student_length, teacher_length, append_eos)(text)
    student_ids = whole_ids(student, text, append_eos)
    cut_ids = student_ids[:student_length]
    assert_tokens(sample.student, cut_ids, student)

    expected = whole_ids(teacher, text, append_eos)
    seen = b"".join(piece(student, i) for i in cut_ids)
    if len(cut_ids) < len(student_ids):
        cuts = {len(b"".join(piece(student, i) for i in cut_ids[: n + 1])) for n in range(len(cut_ids))}
        ends = np.cumsum([len(piece(teacher, i)) for i in expected]).tolist()
        is_text = [i not in (BOS, EOS) for i in expected]
        # A BOS on both sides is a common end, too.
        paired = [
            n + 1 for n, end in enumerate(ends) if (end in cuts if is_text[n] else BOS == expected[n] == cut_ids[0])
        ]
        expected = expected[: max(paired, default=0)]
    assert_tokens(sample.teachers[0].tokens, expected[:teacher_length], teacher)
    assert text.encode().startswith(seen)


def test_eos_is_appended_once(make_tokenizer: Any) -> None:
    """Bug: a text that ends with EOS gets a second one."""
    tokenizer = make_tokenizer(8)
    tokenizer.backend_tokenizer.post_processor = None
    encoder = Encoder.of(tokenizer, 99, append_eos=True)
    assert encoder("cat</s>").ids.tolist().count(EOS) == 1
    assert encoder("cat").ids.tolist().count(EOS) == 1
    assert encoder("").ids.tolist() == [EOS]
    assert len(Encoder.of(tokenizer, 99, append_eos=False)("").ids) == 0


@pytest.mark.parametrize("template", ["$A", "$A </s>", "<s> $A </s>"])
def test_eos_is_located_after_the_text(make_tokenizer: Any, template: str) -> None:
    """Bug: an EOS from the tokenizer was located at the last token, and a teacher lost that token's end."""
    tokenizer = make_tokenizer(8)
    marks = [("<s>", BOS), ("</s>", EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=marks)
    encoder = Encoder.of(tokenizer, 99, append_eos=True)
    encoding, starts = encoder.located("cat q")
    assert encoding.ids[-1] == EOS
    assert (starts == len("cat q")).tolist() == (encoding.ids == EOS).tolist()
    assert [read.ids.tolist() for read in encode_beginning(encoder, [encoder], "", 3)] == [encoder("").ids.tolist()] * 2


def test_empty_text_without_special_tokens(fine: Any, coarse: Any) -> None:
    sample = maker(fine, coarse, 9, 9, append_eos=False)("")
    assert len(sample.student) == 0
    assert sample.teachers[0].tokens.ids.tolist() == [BOS]
    assert sample.teachers[0].chunks is not None
    assert sample.teachers[0].chunks.teacher.tolist() == [-1]


def test_truncation_and_padding_of_the_tokenizer_do_not_leak(make_tokenizer: Any) -> None:
    """Bug: a tokenizer.json, or an earlier call elsewhere, has switched both on."""
    expected = Encoder.of(make_tokenizer(8), 999, append_eos=True)(TEXT).ids.tolist()
    tokenizer = make_tokenizer(8, pad_token="</s>")
    encoder = Encoder.of(tokenizer, 999, append_eos=True)
    tokenizer.backend_tokenizer.enable_truncation(4)
    tokenizer.backend_tokenizer.enable_padding(length=300)
    assert encoder(TEXT).ids.tolist() == expected
    tokenizer(TEXT, truncation=True, max_length=5, padding="max_length")
    assert encoder(TEXT).ids.tolist() == expected


def test_no_warning_about_model_max_length(make_tokenizer: Any) -> None:
    """Bug: transformers warns about long sequences, although each text is cut."""
    tokenizer = make_tokenizer(8, model_max_length=4)
    assert len(Encoder.of(tokenizer, 999, append_eos=True)(TEXT).ids) > 4
    assert not tokenizer.deprecation_warnings


class Inexact:
    """An aligner of two-token chunks; chunk 1 is inexact, and the student's tokens 2 and 3 have no chunk."""

    fingerprint = "inexact"

    def align(self, student_ids: NDArray[np.int32], teacher_ids: NDArray[np.int32]) -> Alignment:
        student = np.array([0, 0, -1, -1, 1, 1, 2, 2], np.int32)
        teacher = np.array([0, 0, 1, 1, 2, 2], np.int32)
        flags = np.zeros(3, np.bool_)
        bounds = np.array([(0, 2, 0, 2), (4, 6, 2, 4), (6, 8, 4, 6)], np.int32)
        return Alignment(
            student, teacher, bounds, flags, np.array([False, True, False]), flags, flags, flags, np.zeros(3, np.int8)
        )


def some_tokens(loss_mask: list[int]) -> Tokens:
    zeros = np.zeros(len(loss_mask), np.int32)
    return Tokens(zeros, np.array(loss_mask, np.bool_), zeros)


@pytest.mark.parametrize(
    ("student_mask", "teacher_mask", "usable"),
    [
        ([1] * 8, [1] * 6, [0, 2]),
        ([0, *[1] * 7], [1] * 6, [2]),
        ([1] * 8, [1, 0, 1, 1, 1, 1], [2]),
        ([1] * 7, [1] * 6, [0]),
        ([1] * 8, [1] * 5, [0]),
        ([1] * 8, [], []),
    ],
)
def test_chunks_that_no_loss_may_use(student_mask: list[int], teacher_mask: list[int], usable: list[int]) -> None:
    """Catches chunks that stay although they are inexact, or masked or cut for one model."""
    aligner: Any = Inexact()
    student, teacher = some_tokens(student_mask), some_tokens(teacher_mask)
    chunks = usable_chunks(aligner.align(student.ids, teacher.ids), student, teacher, "text")
    uncut = [0, 0, -1, -1, 1, 1, 2, 2], [0, 0, 1, 1, 2, 2]
    sides = zip((chunks.student, chunks.teacher), uncut, (student_mask, teacher_mask), strict=True)
    for chunk_ids, everything, mask in sides:
        assert chunk_ids.tolist() == [c if c in usable else -1 for c in everything[: len(mask)]]


@pytest.mark.parametrize("length", [5, 99])
def test_chunks_of_both_sides_spell_the_same_bytes(coarse: Any, fine: Any, length: int) -> None:
    sample = maker(coarse, fine, length, 199)(TEXT)
    teacher = sample.teachers[0]
    assert teacher.chunks is not None

    def spelled(tokens: Tokens, chunk_ids: NDArray[np.int32], tokenizer: Any) -> dict[int, bytes]:
        out: dict[int, bytes] = {}
        for token_id, chunk in zip(tokens.ids, chunk_ids, strict=True):
            if chunk >= 0:
                out[int(chunk)] = out.get(int(chunk), b"") + piece(tokenizer, int(token_id))
        return out

    student_chunks = spelled(sample.student, teacher.chunks.student, coarse)
    assert student_chunks == spelled(teacher.tokens, teacher.chunks.teacher, fine)
    seen = b"".join(piece(coarse, int(i)) for i in sample.student.ids)
    # The teacher's first token has no predictor and no chunk.
    assert piece(fine, int(teacher.tokens.ids[0])) + b"".join(student_chunks.values()) == seen


def test_a_pickled_maker_makes_the_same_sample(coarse: Any, fine: Any) -> None:
    """Bug: workers get the maker by pickle, and lose a setting."""
    original = maker(coarse, fine, 20, 30)
    copy: TextSampleMaker = pickle.loads(pickle.dumps(original))

    def arrays(sample: Sample) -> list[list[int]]:
        chunks = sample.teachers[0].chunks
        assert chunks is not None
        tokens = [sample.student, sample.teachers[0].tokens]
        return [side.ids.tolist() for side in tokens] + [chunks.student.tolist(), chunks.teacher.tolist()]

    assert arrays(copy(TEXT)) == arrays(original(TEXT))


@pytest.mark.parametrize("length", [40, 200, 331])
@pytest.mark.parametrize("is_student_composed", [True, False])
def test_a_teacher_reads_to_the_end_of_a_student_that_rewrites(length: int, is_student_composed: bool) -> None:
    """Bug: the teacher stopped at the student's number of bytes: too early if only the student composes accents, and
    too late in the reverse case.
    """
    text = unicodedata.normalize("NFD", "Ti\u1ebfng Vi\u1ec7t \u0111\u1eb9p, the fox, s\u1ed1 1 v\u00e0 2. ") * 60
    student, teacher = byte_level(600, nfc=is_student_composed), byte_level(455, nfc=not is_student_composed)
    sample = maker(student, teacher, length, 10**6)(text)
    tokens, chunks = sample.teachers[0].tokens, sample.teachers[0].chunks
    assert chunks is not None
    assert chunks.student[-20:].max() >= 0
    read = [
        unicodedata.normalize(
            "NFC", b"".join(pieces_of(side).bytes_of(i) for i in ids.tolist()).decode(errors="ignore")
        )
        for side, ids in ((student, sample.student.ids), (teacher, tokens.ids))
    ]
    assert read[0][:-1].startswith(read[1][:-1])
    assert len(read[0]) - len(read[1]) < 20
    assert chunks.teacher[-1] >= 0


def test_tokens_that_a_teacher_lacks_are_not_learned_from_it(coarse: Any) -> None:
    """Catches replaced ids in the student or another teacher, also after the cache of samples."""
    student = Encoder.of(coarse, 30, True)
    lacked = int(student(TEXT).ids[4])
    sample = TextSampleMaker(student, (SameTokenizer((lacked,), 3), SameTokenizer()))(TEXT)
    fewer, same = sample.teachers
    is_lacked = sample.student.ids == lacked
    assert (fewer.tokens.ids == np.where(is_lacked, 3, sample.student.ids)).all()
    assert (fewer.tokens.loss_mask == sample.student.loss_mask & ~is_lacked).all()
    assert same.tokens is sample.student
    assert same.chunks is None
    (again,) = decoded(encoded([sample]))
    assert (again.teachers[0].tokens.ids == fewer.tokens.ids).all()
    assert again.teachers[1].tokens is again.student
    assert SameTokenizer((lacked,), 3).identity != SameTokenizer().identity
