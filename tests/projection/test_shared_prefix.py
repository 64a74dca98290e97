"""The maps Ψ_S and Ψ_T to shared tokens against brute force."""

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from nemo_opd.alignment import pieces_of
from nemo_opd.projection import ProjectionMatrix, build_projection
from tests.projection.conftest import PAIRS, SMALL, real_matrix
from tests.projection.prefix_oracle import longest
from tests.tokenizers_fixture import byte_level, sentencepiece


def sides(matrix: ProjectionMatrix, student: object, teacher: object) -> list[tuple[list[bytes], np.ndarray, int]]:
    """Return (bytes of every id, map, column of shared_pairs) of student and teacher."""
    return [
        (pieces_of(student).as_list(), matrix.student_shared_prefix, 0),
        (pieces_of(teacher).as_list(), matrix.teacher_shared_prefix, 1),
    ]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_token_of_both_sides(names: tuple[str, str]) -> None:
    """Catches an index into the wrong order of pairs, a prefix that is not shared, and a shorter one."""
    student, teacher = (SMALL[name] for name in names)
    matrix = build_projection(student, teacher)
    shared = matrix.shared_pairs
    assert shared[:, 0].tolist() == np.flatnonzero(matrix.exact).tolist()
    student_pieces = pieces_of(student).as_list()
    shared_contents = [student_pieces[s] for s in shared[:, 0].tolist()]
    for contents, psi, column in sides(matrix, student, teacher):
        assert psi.shape == (len(contents),)
        assert psi[shared[:, column]].tolist() == list(range(len(shared)))
        for token_id, token in enumerate(contents):
            if token:
                assert shared_contents[psi[token_id]] == longest(token, shared_contents)
            else:
                assert psi[token_id] == -1 or shared_contents[psi[token_id]] == b""


def spelled_by(tokenizer: PreTrainedTokenizerBase, pieces: list[bytes], content: bytes) -> list[int]:
    """Return ids that spell the bytes of a text, or an empty list. pieces: the bytes of all ids."""
    try:
        ids = tokenizer(content.decode(), add_special_tokens=False).input_ids
    except UnicodeDecodeError:
        return []
    return ids if b"".join(pieces[i] for i in ids) == content else []


@pytest.mark.parametrize("names", [("one_digit", "sentencepiece"), ("three_digits", "one_digit")], ids="-".join)
def test_maps_by_spelling_follow_first_pieces_to_a_shared_token(names: tuple[str, str]) -> None:
    """Catches spelling with the wrong tokenizer, an end at a piece that is not shared, and an unshared first piece
    that is replaced by its longest prefix instead of its spelling.
    """
    tokenizers = [SMALL[name] for name in names]
    matrix = build_projection(*tokenizers)
    shared = matrix.shared_pairs
    maps = matrix.student_shared_spelling, matrix.teacher_shared_spelling
    contents = [pieces_of(tokenizer).as_list() for tokenizer in tokenizers]
    shared_contents = {contents[0][s] for s in shared[:, 0].tolist()}
    num_checked = 0
    for k, prefixes in enumerate((matrix.student_shared_prefix, matrix.teacher_shared_prefix)):
        assert maps[k][shared[:, k]].tolist() == list(range(len(shared)))
        for token, content in enumerate(contents[k]):
            if not content or content in shared_contents:
                assert maps[k][token] == prefixes[token]
                continue
            side = k
            while content not in shared_contents and (
                ids := spelled_by(tokenizers[1 - side], contents[1 - side], content)
            ):
                side = 1 - side
                content = contents[side][ids[0]]
            if content in shared_contents:
                assert contents[0][shared[maps[k][token], 0]] == content
                num_checked += 1
    assert num_checked > 10


@pytest.mark.tokenizers
def test_a_realised_first_token_is_in_the_cell_of_the_teacher_token_that_it_begins() -> None:
    """Bug: the longest prefix puts a quarter of the teacher's unshared tokens into a different cell."""
    matrix = real_matrix("llama3_1", "gemma3")
    begin = np.append(0, matrix.teacher_spelling_ends[:-1])
    is_shared = np.isin(np.arange(matrix.teacher_vocab_size), matrix.shared_pairs[:, 1])
    tokens = np.flatnonzero((begin < matrix.teacher_spelling_ends) & ~is_shared)
    first = matrix.teacher_spellings[begin[tokens]]
    assert (matrix.teacher_shared_spelling[tokens] == matrix.student_shared_spelling[first]).all()
    by_prefix = matrix.teacher_shared_prefix[tokens] == matrix.student_shared_prefix[first]
    assert 0.7 < by_prefix.mean() < 0.8


def test_twins_meet_in_the_shared_one() -> None:
    """Bug: the student's second ` fox`, which has no partner, has a different cell than the first."""
    student, teacher = byte_level(540), sentencepiece()
    student.add_tokens([" fox"])
    matrix = build_projection(student, teacher)
    ordinary, added = student.convert_tokens_to_ids("Ġfox"), student.convert_tokens_to_ids(" fox")
    psi = matrix.student_shared_prefix
    assert psi[ordinary] == psi[added] == matrix.teacher_shared_prefix[teacher.convert_tokens_to_ids("▁fox")] >= 0


def test_roles_meet_and_the_unknown_goes_to_the_rest() -> None:
    """Catches end tokens in different cells: two of the student and one of the teacher belong together."""
    student, teacher = SMALL["one_digit"], byte_level(430, eos="<|endoftext|>", extra=())
    matrix = build_projection(student, teacher)
    ends = [student.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    cell = matrix.teacher_shared_prefix[teacher.eos_token_id]
    assert matrix.student_shared_prefix[ends].tolist() == [cell, cell]
    assert cell >= 0
    assert matrix.student_shared_prefix[student.convert_tokens_to_ids("<|im_start|>")] == -1
