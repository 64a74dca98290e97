"""The map Φ of longest prefixes against brute force."""

import numpy as np
import pytest

from nemo_opd.alignment import pieces_of
from nemo_opd.projection import add_byte_prefix, build_projection, exact_map
from tests.projection.conftest import PAIRS, SMALL
from tests.projection.prefix_oracle import longest
from tests.tokenizers_fixture import byte_level, sentencepiece


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_teacher_token(names: tuple[str, str]) -> None:
    """Catches a prefix that is not the longest, and a special token's name that counts as text."""
    student, teacher = (SMALL[name] for name in names)
    phi = build_projection(student, teacher).byte_prefix
    student_pieces, teacher_pieces = pieces_of(student).as_list(), pieces_of(teacher).as_list()
    assert phi.shape == (len(teacher_pieces),)
    for t, token in enumerate(teacher_pieces):
        if token:
            assert student_pieces[phi[t]] == longest(token, student_pieces)
        else:
            assert phi[t] == -1 or student_pieces[phi[t]] == b""


def test_the_ordinary_piece_of_equal_bytes_comes_first() -> None:
    """Bug: the student's added token ` fox` wins over its ordinary piece with the same bytes."""
    student, teacher = byte_level(530), sentencepiece()
    student.add_tokens([" fox"])
    phi = build_projection(student, teacher).byte_prefix
    assert phi[teacher.convert_tokens_to_ids("▁fox")] == student.convert_tokens_to_ids("Ġfox")


def test_tokens_without_bytes_go_by_role_or_nowhere() -> None:
    """Catches end tokens without their partner (the teacher has two), and roles other than the matrix's."""
    student, teacher = byte_level(430, eos="<|endoftext|>", extra=("<|mine|>",)), SMALL["one_digit"]
    end, mine, start = student.eos_token_id, student.convert_tokens_to_ids("<|mine|>"), "<|im_start|>"
    phi = build_projection(student, teacher).byte_prefix
    ends = [teacher.convert_tokens_to_ids(token) for token in ("<|im_end|>", "<|endoftext|>")]
    assert phi[ends].tolist() == [end, end]
    assert phi[teacher.convert_tokens_to_ids(start)] == -1
    matrix = exact_map(student, teacher, roles={"<|mine|>": "opening", start: "opening"})
    for phi in (
        add_byte_prefix(matrix, student, teacher).byte_prefix,
        build_projection(student, teacher, roles={"<|mine|>": "opening", start: "opening"}).byte_prefix,
    ):
        assert phi[teacher.convert_tokens_to_ids(start)] == mine
    assert np.array_equal(add_byte_prefix(matrix, student, teacher, roles={}).byte_prefix[ends], [end, end])


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_the_teacher_tokens_that_begin_with_another(names: tuple[str, str]) -> None:
    """Catches a range without equal bytes under another id, by comparing every pair of tokens."""
    teacher = SMALL[names[1]]
    order, begin, end = build_projection(SMALL[names[0]], teacher).teacher_byte_order.T
    pieces = pieces_of(teacher).as_list()
    for t in range(0, len(pieces), 7):
        expected = [u for u, piece in enumerate(pieces) if piece.startswith(pieces[t])] if pieces[t] else [t]
        assert sorted(order[begin[t] : end[t]]) == expected
