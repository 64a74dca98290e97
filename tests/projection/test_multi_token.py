"""Direct and reverse spelling against an oracle that computes one entry at a time."""

from collections import defaultdict

import numpy as np
import pytest

from nemo_opd.alignment import pieces_of
from nemo_opd.alignment.roles import pair_special_tokens
from nemo_opd.alignment.spelling import TEXT
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import ProjectionMatrix, add_multi_token, exact_map
from nemo_opd.projection.retokenization import RawModel
from tests.projection.conftest import PAIRS, SMALL
from tests.tokenizers_fixture import byte_level


def spelling(tokenizer: object, piece: bytes) -> list[int]:
    """Spell one piece with the whole tokenizer if that keeps its bytes, otherwise with the model alone."""
    pieces, backend = pieces_of(tokenizer), tokenizer.backend_tokenizer
    attempts = [RawModel(backend, pieces).encode(piece)]
    if piece.decode("utf-8", "ignore").encode() == piece:
        attempts.insert(0, backend.encode(piece.decode(), add_special_tokens=False).ids)
    return next((ids for ids in attempts if b"".join(map(pieces.bytes_of, ids)) == piece), [])


def expected_rows(student: object, teacher: object, start: ProjectionMatrix, reverse: bool) -> dict[int, list]:
    """Return all entries (−weight, is reverse, teacher id), keyed by row, the best first."""
    student_pieces, teacher_pieces = pieces_of(student), pieces_of(teacher)
    special = pair_special_tokens(student, teacher, student_pieces, teacher_pieces)
    cells: dict[int, dict[int, list]] = defaultdict(dict)
    open_rows = [s for s in range(student_pieces.vocab_size) if special.student_class[s] == TEXT and not start.exact[s]]
    for s in open_rows:
        for place, t in enumerate(spelling(teacher, student_pieces.bytes_of(s))):
            cells[s].setdefault(t, [0.0, False])[0] += 0.9 * 0.1**place
    partners = {int(t) for t in start.indices[start.exact, 0]}
    for t in range(teacher_pieces.vocab_size) if reverse else ():
        if special.teacher_class[t] == TEXT and t not in partners:
            for place, s in enumerate(spelling(student, teacher_pieces.bytes_of(t))):
                if s in open_rows:
                    cells[s].setdefault(t, [0.0, True])[0] += 0.9 * 0.1**place
    return {s: sorted((-w, later, t) for t, (w, later) in row.items()) for s, row in cells.items()}


@pytest.mark.parametrize("reverse", [False, True], ids=["direct", "reverse"])
@pytest.mark.parametrize("names", PAIRS, ids="-".join)
def test_rows_entry_by_entry(names: tuple[str, str], reverse: bool) -> None:
    """Catches a reverse entry in an exact or special row, a weight by the wrong position, and swapped rows."""
    student, teacher = SMALL[names[0]], SMALL[names[1]]
    start = exact_map(student, teacher)
    matrix = add_multi_token(start, student, teacher, width=3, reverse=reverse)
    rows = expected_rows(student, teacher, start, reverse)
    for s in range(start.student_vocab_size):
        if s in rows and start.row_lengths[s] == 0:
            best = rows[s][:3]
            total = -sum(weight for weight, _, _ in best)
            assert matrix.indices[s, : len(best)].tolist() == [t for _, _, t in best], s
            assert matrix.weights[s, : len(best)] == pytest.approx([-w / total for w, _, _ in best], rel=2**-22)
            assert (matrix.indices[s, len(best) :] == -1).all()
        else:
            assert matrix.indices[s].tolist() == [start.indices[s, 0], -1, -1]


def test_a_row_that_has_entries_stays_without_reverse() -> None:
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    once = add_multi_token(exact_map(student, teacher), student, teacher, width=1)
    again = add_multi_token(once, student, teacher, width=4)
    assert np.array_equal(again.indices[:, 0], once.indices[:, 0])
    assert (again.indices[:, 1:] == -1).all()


def test_truncation_and_padding_of_the_tokenizer_do_not_matter() -> None:
    """Catches a pass that spells with the first token of each piece, or that changes the user's setting."""
    student, teacher = SMALL["three_digits"], byte_level(460, r"\p{N}|[^\s\p{L}\p{N}]+|\s?\p{L}+|\s+")
    expected = add_multi_token(exact_map(student, teacher), student, teacher, width=3)
    teacher.backend_tokenizer.enable_truncation(1)
    teacher.backend_tokenizer.enable_padding(length=8)
    try:
        matrix = add_multi_token(exact_map(student, teacher), student, teacher, width=3)
        assert teacher.backend_tokenizer.truncation["max_length"] == 1
    finally:
        teacher.backend_tokenizer.no_truncation()
        teacher.backend_tokenizer.no_padding()
    assert np.array_equal(matrix.indices, expected.indices)


def test_progress_counts_both_directions() -> None:
    student, teacher = SMALL["three_digits"], SMALL["one_digit"]
    seen: list[tuple[int, int]] = []
    start = exact_map(student, teacher)
    add_multi_token(start, student, teacher, width=2, reverse=True, progress=lambda *done: seen.append(done))
    assert seen == sorted(seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1] > int((start.row_lengths == 0).sum())


def test_a_row_needs_room() -> None:
    start = exact_map(SMALL["nfc"], SMALL["one_digit"])
    with pytest.raises(ProjectionError, match="width is 0"):
        add_multi_token(start, SMALL["nfc"], SMALL["one_digit"], width=0)
