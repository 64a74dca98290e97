"""Student tokens with a partner of the same bytes or role (methods.md §2.1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.merge import TEXT
from nemo_opd.alignment.pieces import Pieces, name_of, pieces_of
from nemo_opd.alignment.roles import RoleOverrides, SpecialTokens, pair_special_tokens
from nemo_opd.errors import ProjectionError
from nemo_opd.projection.io import BuilderOptions, Roles, frozen_roles
from nemo_opd.projection.matrix import ProjectionMatrix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True, eq=False)
class Side:
    """One tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    pieces: Pieces
    contents: list[bytes]
    """Bytes of every id; empty for special tokens and holes."""
    is_text: NDArray[np.bool_]
    """Whether an id stands for its bytes rather than for a role."""


@dataclass(frozen=True, slots=True, eq=False)
class TokenizerPair:
    student: Side
    teacher: Side
    special: SpecialTokens
    roles: Roles
    """Overrides used to pair `special`."""
    nearest_student: Mapping[int, int]
    """Teacher id → student id with the closest role, its own partner first, for every teacher id with a partner by
    role.
    """


def read_pair(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    roles: RoleOverrides | None = None,
) -> TokenizerPair:
    """Read both tokenizers. Raises AlignmentError for inexact pieces and for roles of unknown tokens."""
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)
    frozen = frozen_roles(roles)
    special = pair_special_tokens(student_tokenizer, teacher_tokenizer, student, teacher, dict(frozen))
    backward = pair_special_tokens(teacher_tokenizer, student_tokenizer, teacher, student, dict(frozen))
    return TokenizerPair(
        student=Side(student_tokenizer, student, student.as_list(), special.student_class == TEXT),
        teacher=Side(teacher_tokenizer, teacher, teacher.as_list(), special.teacher_class == TEXT),
        special=special,
        roles=frozen,
        nearest_student={**backward.best, **{t: s for s, t in special.pairs}},
    )


def pair_of(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    roles: RoleOverrides | None = None,
) -> TokenizerPair:
    """Read the tokenizers of `matrix`. The matrix's own roles are used unless others are given.

    Raises ProjectionError if the matrix was made for other tokenizers, AlignmentError as `read_pair` does.
    """
    pair = read_pair(student_tokenizer, teacher_tokenizer, dict(matrix.options.roles) if roles is None else roles)
    _check_side("student", matrix.student_fingerprint, matrix.student_vocab_size, pair.student.pieces)
    _check_side("teacher", matrix.teacher_fingerprint, matrix.teacher_vocab_size, pair.teacher.pieces)
    return pair


def _check_side(side: str, fingerprint: str, vocab_size: int, pieces: Pieces) -> None:
    if vocab_size != pieces.vocab_size or fingerprint not in ("", pieces.fingerprint):
        raise ProjectionError(
            f"the projection was made for another {side} tokenizer ({vocab_size} ids, "
            f"fingerprint {fingerprint[:12] or 'unknown'}; the one given has {pieces.vocab_size} ids, fingerprint "
            f"{pieces.fingerprint[:12]}); give the tokenizer it was built from, or build the projection of this pair"
        )


_Arrays = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Indices and weights."""


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """(row, column, weight) entries in any order; a cell may occur several times."""

    rows: NDArray[np.int64]
    columns: NDArray[np.int64]
    weights: NDArray[np.float64]
    later: NDArray[np.bool_]
    """Whether to sort it after other entries of equal weight."""

    @classmethod
    def concatenate(cls, *parts: Entries) -> Entries:
        return cls(
            np.concatenate([part.rows for part in parts]),
            np.concatenate([part.columns for part in parts]),
            np.concatenate([part.weights for part in parts]),
            np.concatenate([part.later for part in parts]),
        )

    def where(self, mask: NDArray[np.bool_]) -> Entries:
        return Entries(self.rows[mask], self.columns[mask], self.weights[mask], self.later[mask])

    def merged(self) -> Entries:
        """Return each cell once, with the sum of its weights, ordered by row and column."""
        order = np.lexsort((self.columns, self.rows))
        rows, columns = self.rows[order], self.columns[order]
        is_first = np.ones(len(rows), np.bool_)
        is_first[1:] = (rows[1:] != rows[:-1]) | (columns[1:] != columns[:-1])
        starts = np.flatnonzero(is_first)
        if not len(starts):
            return self
        return Entries(
            rows[starts],
            columns[starts],
            np.add.reduceat(self.weights[order], starts),
            np.logical_and.reduceat(self.later[order], starts),
        )


def assemble(entries: Entries, num_rows: int, width: int) -> _Arrays:
    """Return teacher ids and weights [num_rows, width] of the heaviest entries of each row, with weights of sum 1.

    Weights of the same cell add up. Ties put entries that are not `later` first, then lower ids.
    """
    merged = entries.merged()
    order = np.lexsort((merged.columns, merged.later, -merged.weights, merged.rows))
    rows, columns, heaviest = merged.rows[order], merged.columns[order], merged.weights[order]
    place = np.arange(len(rows)) - np.searchsorted(rows, rows)
    is_within = place < width
    rows, place = rows[is_within], place[is_within]
    indices = np.full((num_rows, width), -1, np.int32)
    weights = np.zeros((num_rows, width))
    indices[rows, place] = columns[is_within]
    weights[rows, place] = heaviest[is_within]
    return indices, _normalize(weights)


def with_entries(matrix: ProjectionMatrix, rows: NDArray[np.int64], new: Entries, width: int) -> _Arrays:
    """Reassemble `rows` of the matrix from old and new entries, cut to `width`; return the matrix's arrays."""
    place, column = np.nonzero(matrix.indices[rows] >= 0)
    row = rows[place]
    old = Entries(
        row,
        matrix.indices[row, column].astype(np.int64),
        matrix.weights[row, column].astype(np.float64),
        np.zeros(len(row), np.bool_),
    )
    row_indices, row_weights = assemble(Entries.concatenate(old, new), matrix.student_vocab_size, width)
    indices, weights = _widen(matrix, width)
    indices[rows], weights[rows] = -1, 0
    indices[rows, :width], weights[rows, :width] = row_indices[rows], row_weights[rows]
    return indices, weights


def sort_and_cut(matrix: ProjectionMatrix, top_k: int) -> ProjectionMatrix:
    """Sort the entries of each row by weight, cut to [V, top_k] and rescale to sum 1. Empty rows stay empty.

    Ties keep their order in the row: the passes put direct before reverse entries, then lower ids. Raises
    ProjectionError for top_k < 1.
    """
    check_width("top_k", top_k)
    indices, weights = _widen(matrix, top_k)
    order = np.argsort(np.where(indices >= 0, -weights, 1), axis=1, kind="stable")[:, :top_k]
    cut_weights = _normalize(np.take_along_axis(weights, order, axis=1))
    options = matrix.options.after("sort_and_cut", top_k=top_k)
    return replace(matrix, indices=np.take_along_axis(indices, order, axis=1), weights=cut_weights, options=options)


def check_width(name: str, width: int) -> None:
    """Raise ProjectionError if rows have no room for an entry."""
    if width < 1:
        raise ProjectionError(f"{name} is {width}, but a row needs room for one entry; give 1 or more")


def _normalize(weights: NDArray[np.floating]) -> NDArray[np.float32]:
    """Scale rows [V, K] to sum 1; rows without weight stay zero."""
    total = weights.sum(axis=1, keepdims=True, dtype=np.float64)
    return (weights / np.where(total > 0, total, 1)).astype(np.float32)


def _widen(matrix: ProjectionMatrix, width: int) -> _Arrays:
    """Copy the arrays, padded with empty entries to at least `width` columns."""
    room = ((0, 0), (0, max(0, width - matrix.top_k)))
    return np.pad(matrix.indices, room, constant_values=-1), np.pad(matrix.weights, room)


def exact_map(
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Pair equal tokens, with one entry a row [V, 1]: text by bytes, special tokens by role. Other rows are empty.

    `roles` as for TokenAligner. A special token whose partner is already paired has a row that is not flagged exact.
    Raises AlignmentError for a tokenizer whose pieces cannot be exact and for roles of unknown tokens.
    """
    return exact_pass(read_pair(student_tokenizer, teacher_tokenizer, roles))


def exact_pass(pair: TokenizerPair) -> ProjectionMatrix:
    student, teacher = pair.student, pair.teacher
    indices = np.full((student.pieces.vocab_size, 1), -1, np.int32)
    for s, t in pair.special.best.items():
        indices[s, 0] = t
    text = exact_pairs(student.pieces, teacher.pieces, student.is_text, teacher.is_text)
    pairs = np.concatenate([text, np.array(pair.special.pairs, np.int64).reshape(-1, 2)])
    exact = np.zeros(len(indices), np.bool_)
    indices[pairs[:, 0], 0], exact[pairs[:, 0]] = pairs[:, 1], True
    return ProjectionMatrix(
        indices,
        (indices >= 0).astype(np.float32),
        exact,
        teacher_vocab_size=teacher.pieces.vocab_size,
        student_fingerprint=student.pieces.fingerprint,
        teacher_fingerprint=teacher.pieces.fingerprint,
        student_name=name_of(student.tokenizer),
        teacher_name=name_of(teacher.tokenizer),
        options=BuilderOptions(passes=("exact_map",), roles=pair.roles),
    )


def exact_pairs(
    student: Pieces, teacher: Pieces, student_is_text: NDArray[np.bool_], teacher_is_text: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """Return the one-to-one pairs [P, 2] (student id, teacher id) with equal bytes.

    Ids with the same bytes are ranked by origin, then by id, on both sides; equal ranks are paired.
    """
    by_bytes = {key: t for t, key in _with_ranks(teacher, teacher_is_text)}
    pairs = [(s, by_bytes[key]) for s, key in _with_ranks(student, student_is_text) if key in by_bytes]
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)


def _with_ranks(pieces: Pieces, is_text: NDArray[np.bool_]) -> Iterator[tuple[int, tuple[bytes, int]]]:
    """Yield (id, (bytes, rank among the ids with these bytes)) for all text tokens."""
    contents = pieces.as_list()
    seen: dict[bytes, int] = {}
    for token_id in natural_order(pieces, is_text):
        piece = contents[token_id]
        seen[piece] = place = seen.get(piece, -1) + 1
        yield token_id, (piece, place)


def natural_order(pieces: Pieces, mask: NDArray[np.bool_]) -> list[int]:
    """Return the ids in the mask: ordinary pieces, then byte-fallback pieces, then added tokens, each ordered by id."""
    ids = np.flatnonzero(mask)
    return ids[np.argsort(pieces.origin[ids], kind="stable")].tolist()
