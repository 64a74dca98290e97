"""The student tokens that spell each teacher token."""

import numpy as np
import pytest

from nemo_opd.alignment import pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import ProjectionMatrix, build_projection
from tests.projection.conftest import PAIRS, SMALL, real_matrix
from tests.projection.prefix_oracle import longest
from tests.tokenizers_fixture import real_tokenizer


def pieces(ids: np.ndarray, ends: np.ndarray) -> list[list[int]]:
    return [side.tolist() for side in np.split(ids, ends[:-1])]


def spellings(matrix: ProjectionMatrix) -> list[list[int]]:
    return pieces(matrix.teacher_spellings, matrix.teacher_spelling_ends)


def prefixes(matrix: ProjectionMatrix) -> list[list[int]]:
    return pieces(matrix.teacher_prefix_pieces, matrix.teacher_prefix_ends)


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_pieces_have_the_bytes_of_the_token(names: tuple[str, str]) -> None:
    """Catches a tokenizer's space before a text, lost half characters, and pieces of the next token."""
    student, teacher = (SMALL[name] for name in names)
    matrix = build_projection(student, teacher)
    student_pieces, teacher_pieces = pieces_of(student).as_list(), pieces_of(teacher).as_list()
    for spelled, cut, first, token in zip(
        spellings(matrix), prefixes(matrix), matrix.byte_prefix, teacher_pieces, strict=True
    ):
        assert b"".join(student_pieces[s] for s in spelled) == b"".join(student_pieces[s] for s in cut) == token
        assert cut[:1] == [first][: len(cut)]
        at = 0
        for piece in cut:
            assert student_pieces[piece] == longest(token[at:], student_pieces)
            at += len(student_pieces[piece])


@pytest.mark.tokenizers
@pytest.mark.parametrize("pair", [("llama3_1", "qwen3"), ("gpt4o", "gemma3")], ids="-".join)
def test_real_tokens_are_spelled_as_the_student_does(pair: tuple[str, str]) -> None:
    """Catches pieces by longest prefix although the student's merges differ, as for every fifth token."""
    student, teacher = (real_tokenizer(name) for name in pair)
    matrix = real_matrix(*pair)
    text = pieces_of(teacher).as_list()
    shared = set(matrix.shared_pairs[:, 1].tolist())
    spelled, cut = spellings(matrix), prefixes(matrix)
    several = [t for t, token in enumerate(text) if token.isalpha() and t not in shared and len(spelled[t]) > 1]
    for t in several[::500]:
        assert spelled[t] == student.encode(text[t].decode(), add_special_tokens=False)
    assert np.mean([spelled[t][0] != cut[t][0] for t in several]) > 0.1


@pytest.mark.parametrize(
    ("arrays", "reason"),
    [
        ({"teacher_spellings": [0]}, "belong together"),
        ({"teacher_spellings": [0, 1], "teacher_spelling_ends": [2, 1]}, "must ascend from 0 to 2"),
        ({"teacher_spellings": [0, 1], "teacher_spelling_ends": [0, 1]}, "must ascend from 0 to 2"),
        ({"teacher_prefix_pieces": [0, 1], "teacher_prefix_ends": [0, 2]}, r"pieces\[1\] is 1, outside \[0, 1\)"),
    ],
)
def test_pieces_that_fit_no_vocabulary_are_refused(arrays: dict, reason: str) -> None:
    """Catches arrays of another pair, which would name wrong tokens."""
    with pytest.raises(ProjectionError, match=reason):
        ProjectionMatrix([[0]], [[1.0]], teacher_vocab_size=2, **arrays)
