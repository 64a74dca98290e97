"""Properties of every row of a built projection, checked against the tokenizers."""

import numpy as np
import pytest

from nemo_opd.alignment import pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import (
    BuilderOptions,
    ProjectionMatrix,
    add_byte_prefix,
    add_multi_token,
    add_shared_prefix,
    build_projection,
    exact_map,
    sort_and_cut,
)
from tests.projection.conftest import PAIRS, SMALL
from tests.tokenizers_fixture import byte_level, sentencepiece


def entries(matrix: ProjectionMatrix, token_id: int) -> dict[int, float]:
    return {
        t: w
        for t, w in zip(matrix.indices[token_id].tolist(), matrix.weights[token_id].tolist(), strict=True)
        if t >= 0
    }


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_every_row(names: tuple[str, str]) -> None:
    """Catches mass on unrelated ids: each entry's bytes occur in the student's, and the heaviest begins them."""
    student, teacher = SMALL[names[0]], SMALL[names[1]]
    matrix = build_projection(student, teacher, top_k=3)
    student_pieces, teacher_pieces = pieces_of(student), pieces_of(teacher)
    assert matrix.indices.shape == (student_pieces.vocab_size, 3)
    assert matrix.teacher_vocab_size == teacher_pieces.vocab_size
    targets = matrix.indices[matrix.exact, 0]
    assert len(set(targets.tolist())) == len(targets)
    for token_id, piece in enumerate(student_pieces.as_list()):
        row = entries(matrix, token_id)
        if student_pieces.is_special[token_id]:
            assert all(teacher_pieces.is_special[t] for t in row)
            continue
        assert row, f"{piece!r} has no row, though every byte is a token of the teacher"
        assert sum(row.values()) == pytest.approx(1, abs=3 * 2**-23)  # three float32 roundings
        assert piece.startswith(teacher_pieces.bytes_of(max(row, key=row.__getitem__)))
        assert all(teacher_pieces.bytes_of(t) in piece for t in row)
        if matrix.exact[token_id]:
            assert [teacher_pieces.bytes_of(t) for t in row] == [piece]


@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_all_shared_bytes_are_exact(names: tuple[str, str]) -> None:
    """Compare with the intersection of the tokenizers' bytes as Python sets."""
    student_pieces, teacher_pieces = pieces_of(SMALL[names[0]]), pieces_of(SMALL[names[1]])
    matrix = build_projection(SMALL[names[0]], SMALL[names[1]])
    shared = (set(student_pieces.as_list()) & set(teacher_pieces.as_list())) - {b""}
    exact = {student_pieces.bytes_of(i) for i in np.flatnonzero(matrix.exact & (student_pieces.lengths > 0)).tolist()}
    assert exact == shared


@pytest.mark.parametrize("name", SMALL)
def test_a_tokenizer_onto_itself_is_the_identity(name: str) -> None:
    """Catches byte-fallback twins, or tokens that a pre-tokenizer never produces, that do not map to themselves.

    methods.md §5.12: byte_prefix and shared_prefix equal same_vocab in this case.
    """
    matrix = build_projection(SMALL[name], SMALL[name])
    numbers = list(range(matrix.student_vocab_size))
    assert matrix.indices[:, 0].tolist() == matrix.byte_prefix.tolist() == numbers
    assert matrix.exact.all()
    assert matrix.student_shared_prefix.tolist() == matrix.teacher_shared_prefix.tolist() == numbers
    ends = [number + 1 for number in numbers]
    assert (matrix.teacher_spellings.tolist(), matrix.teacher_spelling_ends.tolist()) == (numbers, ends)
    assert (matrix.teacher_prefix_pieces.tolist(), matrix.teacher_prefix_ends.tolist()) == (numbers, ends)


def test_special_tokens_go_by_role_or_stay_empty() -> None:
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    matrix = build_projection(student, teacher)
    assert entries(matrix, student.eos_token_id) == {teacher.eos_token_id: 1.0}
    assert matrix.exact[student.eos_token_id]
    assert entries(matrix, student.convert_tokens_to_ids("<|begin_of_text|>")) == {}
    roles = {"<|begin_of_text|>": "opening", "<|im_start|>": "opening"}
    overridden = build_projection(student, teacher, roles=roles)
    opening = student.convert_tokens_to_ids("<|begin_of_text|>")
    assert entries(overridden, opening) == {teacher.convert_tokens_to_ids("<|im_start|>"): 1.0}


def test_the_ordinary_piece_of_equal_bytes_is_exact() -> None:
    """Catches a byte-fallback piece or an added token that wins over an ordinary piece, whatever their ids."""
    student, teacher = byte_level(520), sentencepiece()
    student.add_tokens([" fox"])
    matrix = build_projection(student, teacher)
    letter = teacher.convert_tokens_to_ids("T")
    assert teacher.convert_tokens_to_ids("<0x54>") < letter
    assert entries(matrix, student.convert_tokens_to_ids("T")) == {letter: 1.0}
    ordinary, added = student.convert_tokens_to_ids("Ġfox"), student.convert_tokens_to_ids(" fox")
    assert matrix.exact[[ordinary, added]].tolist() == [True, False]
    assert entries(matrix, ordinary) == entries(matrix, added) == {teacher.convert_tokens_to_ids("▁fox"): 1.0}
    back = build_projection(teacher, student)
    assert entries(back, teacher.convert_tokens_to_ids("▁fox")) == {ordinary: 1.0}
    assert back.exact[[letter, teacher.convert_tokens_to_ids("<0x54>")]].tolist() == [True, False]


def test_two_student_tokens_may_share_a_teacher_token_but_not_be_exact() -> None:
    """Catches `<|endoftext|>` without its partner, or exact, as eos already is: the teacher has one end token."""
    student, teacher = SMALL["one_digit"], byte_level(430, eos="<|endoftext|>", extra=())
    matrix = build_projection(student, teacher)
    end = student.convert_tokens_to_ids("<|endoftext|>")
    for token_id in (student.eos_token_id, end):
        assert entries(matrix, token_id) == {teacher.eos_token_id: 1.0}
    assert matrix.exact[[student.eos_token_id, end]].tolist() == [True, False]


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[int, int]] = []
    build_projection(SMALL["three_digits"], SMALL["one_digit"], progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1] > 0


@pytest.mark.parametrize("reverse", [False, True])
def test_a_build_is_its_passes(reverse: bool) -> None:
    """Catches a pass that depends on state in memory: the step tools run each pass separately."""
    tokenizers = SMALL["three_digits"], SMALL["sentencepiece"]
    roles = {"<|begin_of_text|>": ("opening", "bos"), "<bos>": "opening"}
    matrix = exact_map(*tokenizers, roles=roles)
    assert (matrix.top_k, matrix.row_lengths.max()) == (1, 1)
    matrix = add_multi_token(matrix, *tokenizers, width=3, reverse=reverse)
    matrix = sort_and_cut(matrix, 3)
    matrix = add_shared_prefix(add_byte_prefix(matrix, *tokenizers), *tokenizers)
    built = build_projection(*tokenizers, 3, reverse=reverse, roles=roles)
    for name in ProjectionMatrix.__slots__:
        assert np.array_equal(getattr(built, name), getattr(matrix, name)), name
    assert built.options == BuilderOptions(
        passes=("exact_map", "multi_token", "sort_and_cut", "byte_prefix", "shared_prefix"),
        roles=(("<bos>", ("opening",)), ("<|begin_of_text|>", ("opening", "bos"))),
        width=3,
        decay=0.1,
        reverse=reverse,
        top_k=3,
    )


def test_a_pass_refuses_tokenizers_of_another_pair() -> None:
    """Bug: tokenizers of another pair pass if their sizes are equal."""
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    twin = byte_level(eos="<|other|>")
    assert pieces_of(twin).vocab_size == pieces_of(student).vocab_size
    matrix = exact_map(student, teacher)
    with pytest.raises(ProjectionError, match="another student tokenizer"):
        add_multi_token(matrix, twin, teacher, width=2)
    with pytest.raises(ProjectionError, match="another teacher tokenizer"):
        add_byte_prefix(matrix, student, twin)
