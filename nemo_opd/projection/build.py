"""Complete build of a projection, with all passes of methods.md §2 in order, its cache, and its audit."""

from __future__ import annotations

import hashlib
import logging
import re
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nemo_opd.alignment.pieces import HOLE, fingerprint, name_of, pieces_of
from nemo_opd.alignment.token_roles import RoleOverrides, roles_of
from nemo_opd.errors import ProjectionError
from nemo_opd.paths import cache_dir
from nemo_opd.projection.embedding import EmbeddingSource, embedding_pass
from nemo_opd.projection.exact import exact_pass, read_pair
from nemo_opd.projection.io import VERSION, frozen_roles
from nemo_opd.projection.matrix import ProjectionMatrix, check_width, sort_and_cut
from nemo_opd.projection.retokenization import Progress, byte_prefix_pass, multi_token_pass, shared_prefix_pass

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_log = logging.getLogger(__name__)

_BUILDER_VERSION = 6
"""Increment when the same tokenizers yield another matrix."""
_NUMERALS_COVERED = 0.9
"""Share of numerals of each length that must be covered for exact pairs to carry arithmetic."""
_FEW_SHARED = 0.5
"""Overlap below which an exact map lacks most of the smaller vocabulary; published pairs start at 0.63."""
_FEW_EXACT = 0.25
"""Share of the student's tokens with a partner below which exact pairs are the exception."""
_MUCH_WITHOUT_ROW = 0.05
"""Share of the student's text tokens without a row above which ordinary text, not only oddities, has no target."""
_PAIR_LOSSES = ("gold", "h_kl", "strict")
"""Losses that compare tokens with a partner."""
_ROW_LOSSES = ("p_kl", *_PAIR_LOSSES)
"""Losses that read the projection's rows. byte_prefix and shared_prefix have their own maps; alm, uld and sampled_kl
use none.
"""
CJK = re.compile("[\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff]")


def build_projection(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    top_k: int = 4,
    progress: Progress | None = None,
    *,
    reverse: bool = False,
    embeddings: EmbeddingSource | None = None,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Map each student token to the teacher token with the same bytes or role, otherwise to the teacher's pieces of its
    bytes.

    `reverse` and `embeddings` run the optional passes; `roles` as for TokenAligner. Rows of special tokens without a
    partner and of holes stay empty. The byte-prefix and shared-prefix maps are always built.

    Raises AlignmentError for a tokenizer whose pieces cannot be exact, ProjectionError for top_k < 1 or an empty map.
    """
    check_width("top_k", top_k)
    pair = read_pair(student_tokenizer, teacher_tokenizer, roles)
    matrix = exact_pass(pair)
    matrix = multi_token_pass(matrix, pair, width=top_k, reverse=reverse, progress=progress)
    if embeddings is not None:
        matrix = embedding_pass(matrix, pair, embeddings, progress)
    matrix = sort_and_cut(matrix, top_k)
    if not matrix.row_lengths.any():
        raise ProjectionError(
            f"no token of {matrix.student_name} can be spelled with {matrix.teacher_name}; "
            "a projection between them would be empty"
        )
    return shared_prefix_pass(byte_prefix_pass(matrix, pair), pair)


def cached_projection(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    top_k: int = 4,
    progress: Progress | None = None,
    *,
    reverse: bool = False,
    roles: RoleOverrides | None = None,
) -> tuple[ProjectionMatrix, Path]:
    """Return a pair's projection and the cache file that holds it; build it if the file is missing or damaged.

    Several processes may do this at once: each writes a complete file, and all files are equal. Raises AlignmentError
    and ProjectionError as `build_projection` does.
    """
    path = cache_dir("projection") / _file_name(student_tokenizer, teacher_tokenizer, top_k, reverse, roles)
    if path.exists():
        try:
            return ProjectionMatrix.load(path, student_tokenizer, teacher_tokenizer), path
        except ProjectionError as error:
            _log.warning("rebuilding a projection: %s", error)
    matrix = build_projection(student_tokenizer, teacher_tokenizer, top_k, progress, reverse=reverse, roles=roles)
    matrix.save(path)
    return matrix, path


def _file_name(
    student: PreTrainedTokenizerBase,
    teacher: PreTrainedTokenizerBase,
    top_k: int,
    reverse: bool,
    roles: RoleOverrides | None,
) -> str:
    """Name everything the matrix depends on. Roles depend on more than fingerprints, such as which token is eos."""
    meaning = repr(
        (sorted(roles_of(student, roles).items()), sorted(roles_of(teacher, roles).items()), frozen_roles(roles))
    )
    parts = (
        fingerprint(student)[:16],
        fingerprint(teacher)[:16],
        hashlib.sha256(meaning.encode()).hexdigest()[:8],
        f"k{top_k}{'r' if reverse else ''}",
        f"v{VERSION}.{_BUILDER_VERSION}",
    )
    return "-".join(parts) + ".safetensors"


@dataclass(frozen=True, slots=True)
class Coverage:
    """Coverage of tokens of one kind."""

    total: int
    exact: int
    """Tokens with a partner of the same bytes or role."""
    spelled: int
    """Tokens with a row."""

    @property
    def rate(self) -> float:
        """exact / total; 1 if `total` is 0."""
        return self.exact / self.total if self.total else 1.0


@dataclass(frozen=True, slots=True)
class Audit:
    student_name: str
    teacher_name: str
    student_vocab_size: int
    teacher_vocab_size: int
    overlap: float
    """One-to-one pairs divided by ids of the smaller vocabulary."""
    one_to_one: float
    """Share of the student's ids with an exact partner."""
    rows_by_pieces: tuple[int, ...]
    """Number of student ids by teacher tokens in their row, from 0 to top_k; holes are not counted."""
    digits: tuple[Coverage, Coverage, Coverage]
    """Numerals of 1, 2 and 3 digits that are one token on at least one side."""
    whitespace: Coverage
    cjk: Coverage
    partial_utf8: Coverage
    """Tokens whose bytes are not complete characters."""
    special: Coverage
    text: Coverage
    """All tokens that stand for bytes."""


def audit(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    matrix: ProjectionMatrix | None = None,
) -> Audit:
    """Measure the coverage of `matrix`, which is built if not given (some seconds for large vocabularies).

    Raises ProjectionError for a matrix of other sizes, or without any entry.
    """
    matrix = build_projection(student_tokenizer, teacher_tokenizer) if matrix is None else matrix
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    sizes = (matrix.student_vocab_size, matrix.teacher_vocab_size)
    if sizes != (student.vocab_size, teacher.vocab_size):
        raise ProjectionError(
            f"the projection is {sizes[0]} × {sizes[1]}, but the tokenizers have {student.vocab_size} and "
            f"{teacher.vocab_size} ids; build the projection of this pair"
        )
    if not matrix.row_lengths.any():
        raise ProjectionError("the projection has no entries, so nothing could be distilled through it")
    contents = student.as_list()
    lengths = matrix.row_lengths
    exists = student.origin != HOLE
    num_ids = min(int(exists.sum()), int((teacher.origin != HOLE).sum()))

    def coverage(ids: list[int]) -> Coverage:
        return Coverage(len(ids), int(matrix.exact[ids].sum()), int((lengths[ids] > 0).sum()))

    teacher_contents, numeral_ids = set(teacher.as_list()), defaultdict[bytes, list[int]](list)
    for token_id, piece in enumerate(contents):
        if piece.isdigit():
            numeral_ids[piece].append(token_id)

    def numerals(num_digits: int) -> Coverage:
        spellings = [b"%0*d" % (num_digits, value) for value in range(10**num_digits)]
        rows = [numeral_ids[numeral] for numeral in spellings if numeral in numeral_ids]
        return Coverage(
            total=sum(numeral in numeral_ids or numeral in teacher_contents for numeral in spellings),
            exact=sum(bool(matrix.exact[row].any()) for row in rows),
            spelled=sum(bool((matrix.indices[row, 0] >= 0).any()) for row in rows),
        )

    return Audit(
        student_name=name_of(student_tokenizer),
        teacher_name=name_of(teacher_tokenizer),
        student_vocab_size=student.vocab_size,
        teacher_vocab_size=teacher.vocab_size,
        overlap=float(matrix.exact.sum() / num_ids),
        one_to_one=float(matrix.exact.sum() / exists.sum()),
        rows_by_pieces=tuple(np.bincount(lengths[exists], minlength=matrix.top_k + 1).tolist()),
        digits=(numerals(1), numerals(2), numerals(3)),
        whitespace=coverage([i for i, piece in enumerate(contents) if piece.isspace()]),
        cjk=coverage([i for i, piece in enumerate(contents) if CJK.search(piece.decode("utf-8", "ignore"))]),
        partial_utf8=coverage([i for i, piece in enumerate(contents) if is_partial_utf8(piece)]),
        special=coverage(np.flatnonzero(student.is_special).tolist()),
        text=coverage(np.flatnonzero(student.lengths > 0).tolist()),
    )


def is_partial_utf8(piece: bytes) -> bool:
    """Return whether bytes are not a sequence of complete characters."""
    try:
        piece.decode()
    except UnicodeDecodeError:
        return True
    return False


def fit_warnings(audit: Audit, loss: str) -> list[str]:
    """List the reasons why a loss of this type (`p_kl`, `h_kl`, …) does not suit the pair, one sentence each.

    Losses that read no rows (`byte_prefix`, `shared_prefix`, `alm`, `uld`, `sampled_kl`, `same_vocab`) always suit it.
    """
    warnings = []
    if loss in _PAIR_LOSSES:
        uncovered = [
            f"{coverage.exact:,} of {coverage.total:,} numerals of {length} digit{'s' if length > 1 else ''}"
            for length, coverage in enumerate(audit.digits, start=1)
            if coverage.rate < _NUMERALS_COVERED
        ]
        if uncovered:
            warnings.append(
                f"{loss} compares exact pairs, but only {' and '.join(uncovered)} have one, so little arithmetic is "
                "distilled; p_kl reads the rows that spell the other numerals"
            )
        if audit.overlap < _FEW_SHARED or audit.one_to_one < _FEW_EXACT:
            warnings.append(
                f"{loss} compares exact pairs, but only {audit.one_to_one:.0%} of the student's tokens have one "
                f"(overlap {audit.overlap:.3f}), so little is distilled; p_kl reaches the other tokens"
            )
    without = audit.text.total - audit.text.spelled
    if loss in _ROW_LOSSES and without > _MUCH_WITHOUT_ROW * audit.text.total:
        warnings.append(
            f"{without:,} of the student's {audit.text.total:,} text tokens have no row in the projection, so {loss} "
            "teaches nothing about them; add the multi-token pass to the projection"
        )
    return warnings
