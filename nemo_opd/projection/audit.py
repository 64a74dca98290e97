"""What a projection covers, and which loss that suggests (METHODS §2)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from nemo_opd.alignment.backend import name_of
from nemo_opd.alignment.pieces import HOLE, Pieces, pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection.build import build_projection
from nemo_opd.projection.matrix import ProjectionMatrix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NUMERALS_COVERED = 0.9
"""Share of the numerals of each length from which exact pairs carry arithmetic."""
CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")


@dataclass(frozen=True, slots=True)
class Coverage:
    """How the tokens of one kind fare."""

    total: int
    exact: int
    """With a partner of the same bytes or role."""
    spelled: int
    """With any row."""

    @property
    def rate(self) -> float:
        """exact / total; 1 where there is nothing to cover."""
        return self.exact / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class Audit:
    student_name: str
    teacher_name: str
    student_vocab_size: int
    teacher_vocab_size: int
    overlap: float
    """One-to-one pairs / ids of the smaller vocabulary."""
    one_to_one: float
    """Share of the student's ids that have an exact partner."""
    rows_by_pieces: tuple[int, ...]
    """Student ids by the number of teacher tokens in their row, from 0 to top_k; without holes."""
    digits: tuple[Coverage, Coverage, Coverage]
    """Numerals of 1, 2 and 3 digits that are one token on either side."""
    whitespace: Coverage
    cjk: Coverage
    partial_utf8: Coverage
    """Tokens that are not whole characters."""
    special: Coverage

    @property
    def recommended_loss(self) -> Literal["h_kl", "p_kl"]:
        return recommended_loss(self.digits)


def recommended_loss(digits: Iterable[Coverage]) -> Literal["h_kl", "p_kl"]:
    """h_kl, which compares exact pairs, where the numerals of every length are covered; else p_kl."""
    return "h_kl" if all(coverage.rate >= NUMERALS_COVERED for coverage in digits) else "p_kl"


def audit(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    matrix: ProjectionMatrix | None = None,
) -> Audit:
    """The coverage of `matrix`, which is built here when not given (some seconds for large vocabularies).

    Raises ProjectionError for a matrix of other sizes and for one without any entry.
    """
    matrix = build_projection(student_tokenizer, teacher_tokenizer) if matrix is None else matrix
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    _check(matrix, student, teacher)
    contents = student.as_list()
    lengths = matrix.row_lengths
    exists = student.origin != HOLE
    num_ids = min(int(exists.sum()), int((teacher.origin != HOLE).sum()))

    def coverage(ids: list[int]) -> Coverage:
        return Coverage(len(ids), int(matrix.exact[ids].sum()), int((lengths[ids] > 0).sum()))

    return Audit(
        student_name=name_of(student_tokenizer),
        teacher_name=name_of(teacher_tokenizer),
        student_vocab_size=student.vocab_size,
        teacher_vocab_size=teacher.vocab_size,
        overlap=float(matrix.exact.sum() / num_ids),
        one_to_one=float(matrix.exact.sum() / exists.sum()),
        rows_by_pieces=tuple(np.bincount(lengths[exists], minlength=matrix.top_k + 1).tolist()),
        digits=_digits(matrix, contents, set(teacher.as_list())),
        whitespace=coverage([i for i, piece in enumerate(contents) if piece.isspace()]),
        cjk=coverage([i for i, piece in enumerate(contents) if CJK.search(piece.decode("utf-8", "ignore"))]),
        partial_utf8=coverage([i for i, piece in enumerate(contents) if is_partial_utf8(piece)]),
        special=coverage(np.flatnonzero(student.is_special).tolist()),
    )


def is_partial_utf8(piece: bytes) -> bool:
    """Not a sequence of whole characters."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def _digits(
    matrix: ProjectionMatrix, contents: list[bytes], teacher: set[bytes]
) -> tuple[Coverage, Coverage, Coverage]:
    ids: dict[bytes, list[int]] = {}
    for token_id, piece in enumerate(contents):
        if piece.isdigit() and len(piece) <= 3:
            ids.setdefault(piece, []).append(token_id)
    one, two, three = (_numerals(matrix, ids, teacher, num_digits) for num_digits in (1, 2, 3))
    return one, two, three


def _numerals(matrix: ProjectionMatrix, ids: dict[bytes, list[int]], teacher: set[bytes], num_digits: int) -> Coverage:
    numerals = [b"%0*d" % (num_digits, value) for value in range(10**num_digits)]
    rows = [ids[numeral] for numeral in numerals if numeral in ids]
    return Coverage(
        total=sum(numeral in ids or numeral in teacher for numeral in numerals),
        exact=sum(bool(matrix.exact[row].any()) for row in rows),
        spelled=sum(bool((matrix.indices[row, 0] >= 0).any()) for row in rows),
    )


def _check(matrix: ProjectionMatrix, student: Pieces, teacher: Pieces) -> None:
    sizes = (matrix.student_vocab_size, matrix.teacher_vocab_size)
    if sizes != (student.vocab_size, teacher.vocab_size):
        raise ProjectionError(
            f"the projection is {sizes[0]} × {sizes[1]}, but the tokenizers have {student.vocab_size} and "
            f"{teacher.vocab_size} ids; build the projection of this pair"
        )
    if not matrix.row_lengths.any():
        raise ProjectionError("the projection has no entry at all, so nothing could be distilled through it")
