"""Projection of a student's vocabulary onto a teacher's, and matrices made of entries (methods.md §2)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_opd.alignment.pieces import fingerprint
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import io
from nemo_opd.projection.io import PIECE_ARRAYS, BuilderOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Importer = Callable[
    ["str | PathLike[str]", "PreTrainedTokenizerBase | None", "PreTrainedTokenizerBase | None"], "ProjectionMatrix"
]
IMPORTERS: dict[str, _Importer] = {}
"""File suffix → reader of a foreign format, registered by the reader's module."""
_ROW_SUM_TOLERANCE = 1e-4
"""float32 weights of a row sum to 1 within K · 6e-8; the tolerance also admits weights written with few digits."""

_Arrays = tuple[NDArray[np.int32], NDArray[np.float32]]
"""Indices and weights."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, init=False)
class ProjectionMatrix:
    """Row-stochastic [V, W] with at most K entries per row: a student token → the teacher tokens that spell it."""

    indices: NDArray[np.int32]
    """[V, K]: teacher ids, distinct within a row; −1 is empty."""
    weights: NDArray[np.float32]
    """[V, K]: ≥ 0, with sum 1 in a row that has entries; 0 in empty places."""
    exact: NDArray[np.bool_]
    """[V]: whether the row's only entry has the same bytes or role, and is not the entry of another exact row."""
    teacher_vocab_size: int
    student_fingerprint: str
    teacher_fingerprint: str
    student_name: str
    teacher_name: str
    byte_prefix: NDArray[np.int32] | None
    """Φ [W]: longest student token that begins a teacher token, or −1. None if not built."""
    student_shared_prefix: NDArray[np.int32] | None
    """Ψ_S [V]: longest shared token that begins a student token, as a row of `shared_pairs`, or −1."""
    teacher_shared_prefix: NDArray[np.int32] | None
    """Ψ_T [W]: the same for teacher tokens."""
    student_shared_spelling: NDArray[np.int32] | None
    """Ψ_S [V] by spelling: the first shared token among first tokens of spellings, as a row of `shared_pairs`, or −1.
    """
    teacher_shared_spelling: NDArray[np.int32] | None
    """Ψ_T [W] by spelling."""
    teacher_byte_order: NDArray[np.int32] | None
    """[W, 3]: teacher tokens in byte order, and the range of tokens that begin with each, from `byte_order`."""
    teacher_spellings: NDArray[np.int32] | None
    """σ: student tokens that spell the teacher tokens, concatenated. None if not built."""
    teacher_spelling_ends: NDArray[np.int32] | None
    """[W]: end of each teacher token's spelling in `teacher_spellings`."""
    teacher_prefix_pieces: NDArray[np.int32] | None
    """The teacher tokens, cut into the longest student tokens from the left, concatenated."""
    teacher_prefix_ends: NDArray[np.int32] | None
    """[W]"""
    student_bytes: NDArray[np.int32] | None
    """Bytes of the student's text tokens, concatenated."""
    student_byte_ends: NDArray[np.int32] | None
    """[V]"""
    teacher_bytes: NDArray[np.int32] | None
    """Bytes of the teacher's text tokens, concatenated."""
    teacher_byte_ends: NDArray[np.int32] | None
    """[W]"""
    options: BuilderOptions

    def __init__(
        self,
        indices: ArrayLike,
        weights: ArrayLike,
        exact: ArrayLike | None = None,
        *,
        teacher_vocab_size: int | None = None,
        student_fingerprint: str = "",
        teacher_fingerprint: str = "",
        student_name: str = "",
        teacher_name: str = "",
        byte_prefix: ArrayLike | None = None,
        student_shared_prefix: ArrayLike | None = None,
        teacher_shared_prefix: ArrayLike | None = None,
        student_shared_spelling: ArrayLike | None = None,
        teacher_shared_spelling: ArrayLike | None = None,
        teacher_byte_order: ArrayLike | None = None,
        teacher_spellings: ArrayLike | None = None,
        teacher_spelling_ends: ArrayLike | None = None,
        teacher_prefix_pieces: ArrayLike | None = None,
        teacher_prefix_ends: ArrayLike | None = None,
        student_bytes: ArrayLike | None = None,
        student_byte_ends: ArrayLike | None = None,
        teacher_bytes: ArrayLike | None = None,
        teacher_byte_ends: ArrayLike | None = None,
        options: BuilderOptions | None = None,
    ) -> None:
        """Check and store the arrays. Without `exact`, no row is exact.

        `teacher_vocab_size` (largest id + 1) defaults to the largest index + 1, which is too small if no row reaches
        the last teacher ids. Raises ProjectionError for arrays that are not such a matrix.
        """
        checked_indices, checked_weights = _arrays(indices, weights)
        rows = len(checked_indices)
        size = int(checked_indices.max(initial=-1)) + 1 if teacher_vocab_size is None else int(teacher_vocab_size)
        flags = np.zeros(rows, np.bool_) if exact is None else np.asarray(exact)
        _check_rows(checked_indices, checked_weights, size)
        _check_exact(flags, checked_indices)
        shared_maps = (
            (student_shared_prefix, teacher_shared_prefix),
            (student_shared_spelling, teacher_shared_spelling),
        )
        if any((student is None) != (teacher is None) for student, teacher in shared_maps):
            raise ProjectionError("a shared-prefix map is given for one side only; give both or neither")
        num_shared = int(flags.sum())
        values = {
            "indices": checked_indices.astype(np.int32),
            "weights": checked_weights.astype(np.float32),
            "exact": flags,
            "teacher_vocab_size": size,
            "student_fingerprint": student_fingerprint,
            "teacher_fingerprint": teacher_fingerprint,
            "student_name": student_name,
            "teacher_name": teacher_name,
            "byte_prefix": _id_map("byte_prefix", byte_prefix, size, rows),
            "student_shared_prefix": _id_map("student_shared_prefix", student_shared_prefix, rows, num_shared),
            "teacher_shared_prefix": _id_map("teacher_shared_prefix", teacher_shared_prefix, size, num_shared),
            "student_shared_spelling": _id_map("student_shared_spelling", student_shared_spelling, rows, num_shared),
            "teacher_shared_spelling": _id_map("teacher_shared_spelling", teacher_shared_spelling, size, num_shared),
            "teacher_byte_order": _checked_byte_order(teacher_byte_order, size),
            **_checked_pieces(
                "teacher_spellings", teacher_spellings, "teacher_spelling_ends", teacher_spelling_ends, size, rows
            ),
            **_checked_pieces(
                "teacher_prefix_pieces", teacher_prefix_pieces, "teacher_prefix_ends", teacher_prefix_ends, size, rows
            ),
            **_checked_pieces("student_bytes", student_bytes, "student_byte_ends", student_byte_ends, rows, 256),
            **_checked_pieces("teacher_bytes", teacher_bytes, "teacher_byte_ends", teacher_byte_ends, size, 256),
            "options": BuilderOptions() if options is None else options,
        }
        for name, value in values.items():
            object.__setattr__(self, name, value)

    @property
    def student_vocab_size(self) -> int:
        """V: number of student ids, which have one row each."""
        return len(self.indices)

    @property
    def top_k(self) -> int:
        """K"""
        return self.indices.shape[1]

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """[V]: number of entries in each row."""
        return (self.indices >= 0).sum(axis=1)

    @property
    def shared_pairs(self) -> NDArray[np.int32]:
        """[X, 2]: the shared vocabulary, (student id, teacher id) of the exact rows, ordered by student id."""
        students = np.flatnonzero(self.exact).astype(np.int32)
        return np.stack([students, self.indices[students].max(axis=1, initial=-1)], axis=1)

    def with_weights(self, weights: NDArray[np.float32]) -> ProjectionMatrix:
        """Replace the weights [V, K]. Raises ProjectionError for weights that do not fit."""
        return replace(self, weights=weights)

    def save(self, path: str | PathLike[str]) -> None:
        """Write a single safetensors file, complete or not at all. Raises ProjectionError if that fails."""
        io.write(path, {field.name: getattr(self, field.name) for field in fields(self)})

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        student_tokenizer: PreTrainedTokenizerBase | None = None,
        teacher_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> ProjectionMatrix:
        """Read a file from `save`, or NeMo-RL's `.pt` file, and check that it belongs to the given tokenizers.

        A `.pt` file does not name its tokenizers. With both given, it gets their sizes, fingerprints and exact rows if
        its ids fit. Raises ProjectionError for a file that is missing, damaged, of another version or of another pair.
        """
        if (importer := IMPORTERS.get(Path(path).suffix)) is not None:
            return importer(path, student_tokenizer, teacher_tokenizer)
        content = io.read(path)
        _check_pair(path, "student", content["student_fingerprint"], student_tokenizer)
        _check_pair(path, "teacher", content["teacher_fingerprint"], teacher_tokenizer)
        try:
            return cls(**content)
        except ProjectionError as error:
            raise ProjectionError(f"{path} does not hold a projection: {error}") from None


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


def order_by_student(matrix: ProjectionMatrix, vocab_size: int) -> NDArray[np.int64]:
    """Return the ids of the first `vocab_size` teacher tokens, ordered by student token.

    Losses read the teacher's logits of paired tokens for some of the student's columns at a time. A GPU reads 32 bytes
    at once, so a logit whose neighbours are not needed costs eight times its bytes.

    A token's student token is its exact partner, or else the first one with it as an entry. Tokens without one come
    last. Tokens in only one of both vocabulary sizes are never moved before tokens in both.
    """
    student, slot = np.nonzero(matrix.weights > 0)
    first = np.full(max(vocab_size, matrix.teacher_vocab_size), matrix.student_vocab_size)
    np.minimum.at(first, matrix.indices[student, slot], student)
    paired_students, paired_teachers = matrix.shared_pairs.T
    first[paired_teachers] = paired_students
    return np.argsort(first[:vocab_size], kind="stable")


def with_columns(matrix: ProjectionMatrix, order: NDArray[np.int64]) -> ProjectionMatrix:
    """Replace teacher ids by columns: column c is the token order[c], from `order_by_student`.

    Ids beyond the order stay the same. The result belongs to reordered logits, not to a tokenizer.
    """
    size = matrix.teacher_vocab_size
    order = np.append(order, np.arange(len(order), size))[:size]
    column = np.argsort(order).astype(np.int32)
    maps = {
        name: values[order]
        for name in ("byte_prefix", "teacher_shared_prefix", "teacher_shared_spelling")
        if (values := getattr(matrix, name)) is not None
    }
    if (byte_order := matrix.teacher_byte_order) is not None:
        maps["teacher_byte_order"] = np.concatenate([column[byte_order[:, :1]], byte_order[order, 1:]], axis=1)
    for name, ends_name in PIECE_ARRAYS.items():
        if name.startswith("teacher") and (ends := getattr(matrix, ends_name)) is not None:
            lengths = np.diff(ends, prepend=0)[order]
            maps[ends_name] = lengths.cumsum()
            place = np.arange(lengths.sum()) + np.repeat(ends[order] - maps[ends_name], lengths)
            maps[name] = getattr(matrix, name)[place]
    return replace(matrix, indices=np.where(matrix.indices >= 0, column[matrix.indices], -1), **maps)


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


def _arrays(indices: ArrayLike, weights: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    raw_indices, raw_weights = np.asarray(indices), np.asarray(weights)
    if raw_indices.ndim != 2 or raw_indices.shape != raw_weights.shape:
        raise ProjectionError(
            f"indices {raw_indices.shape} and weights {raw_weights.shape} must both be [student vocabulary, top_k]"
        )
    if raw_indices.dtype.kind not in "iu" or raw_weights.dtype.kind not in "iuf":
        raise ProjectionError(
            f"indices must be integers and weights floats, not {raw_indices.dtype} and {raw_weights.dtype}"
        )
    return raw_indices.astype(np.int64), raw_weights.astype(np.float64)


def _check_rows(indices: NDArray[np.int64], weights: NDArray[np.float64], size: int) -> None:
    used = indices >= 0
    ordered = np.sort(indices, axis=1)
    sums = weights.sum(axis=1)
    _refuse((indices < -1) | (indices >= size), f"has an index outside [-1, {size}), the teacher's vocabulary")
    _refuse(~np.isfinite(weights) | (weights < 0), "has a weight that is negative or not finite")
    _refuse(~used & (weights != 0), "has weight at an empty entry (index -1)")
    _refuse((ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0), "has a teacher id twice; add up their weights")
    _refuse(used.any(axis=1) & (np.abs(sums - 1) > _ROW_SUM_TOLERANCE), "has weights whose sum is not 1")


def _refuse(bad: NDArray[np.bool_], problem: str) -> None:
    if bad.any():
        raise ProjectionError(f"row {int(np.argwhere(bad)[0][0])} {problem}")


def _check_exact(exact: NDArray[np.bool_], indices: NDArray[np.int64]) -> None:
    if exact.shape != (len(indices),) or exact.dtype != np.bool_:
        raise ProjectionError(f"exact must be bool [{len(indices)}], not {exact.dtype} {exact.shape}")
    _refuse(exact & ((indices >= 0).sum(axis=1) != 1), "is flagged exact but has not exactly one entry")
    targets = np.sort(indices.max(axis=1, initial=-1)[exact])
    twice = targets[1:][targets[1:] == targets[:-1]]
    if len(twice):
        raise ProjectionError(
            f"teacher id {twice[0]} is the entry of two rows flagged exact; exact pairs are one-to-one"
        )


def _check_pair(path: str | PathLike[str], side: str, expected: str, tokenizer: PreTrainedTokenizerBase | None) -> None:
    if tokenizer is None or fingerprint(tokenizer) == expected:
        return
    made_for = f"fingerprint {expected[:12]}…" if expected else "no tokenizer in particular"
    raise ProjectionError(
        f"{path} was made for another {side} tokenizer ({made_for}, not {fingerprint(tokenizer)[:12]}…); "
        "build the projection of this pair with nemo-opd projection build, or use projection: auto"
    )


def _integers(name: str, values: ArrayLike, shape: tuple[int, ...]) -> NDArray[np.integer]:
    array = np.asarray(values)
    if array.shape != shape or array.dtype.kind not in "iu":
        raise ProjectionError(f"{name} must be integers {list(shape)}, not {array.dtype} {array.shape}")
    return array


def _id_map(name: str, ids: ArrayLike | None, length: int, limit: int) -> NDArray[np.int32] | None:
    """Check a map [length] onto ids below `limit`, −1 for none."""
    if ids is None:
        return None
    array = _integers(name, ids, (length,))
    outside = np.flatnonzero((array < -1) | (array >= limit))
    if len(outside):
        raise ProjectionError(f"{name}[{outside[0]}] is {array[outside[0]]}, outside [-1, {limit})")
    return array.astype(np.int32)


def _checked_byte_order(values: ArrayLike | None, size: int) -> NDArray[np.int32] | None:
    """Check `teacher_byte_order` [size, 3]."""
    if values is None:
        return None
    array = _integers("teacher_byte_order", values, (size, 3))
    order, begin, end = array.T
    if not np.array_equal(np.sort(order), np.arange(size)):
        raise ProjectionError(f"teacher_byte_order does not order the {size} teacher tokens: each comes once")
    wrong = np.flatnonzero((begin < 0) | (begin >= end) | (end > size))
    if len(wrong):
        raise ProjectionError(
            f"teacher_byte_order gives teacher id {wrong[0]} the range {begin[wrong[0]]} to {end[wrong[0]]} of {size}"
        )
    return array.astype(np.int32)


def _checked_pieces(
    name: str, pieces: ArrayLike | None, ends_name: str, ends: ArrayLike | None, size: int, limit: int
) -> dict[str, NDArray[np.int32] | None]:
    """Check the pieces, ids below `limit`, of `size` tokens."""
    if pieces is None and ends is None:
        return {name: None, ends_name: None}
    if pieces is None or ends is None:
        raise ProjectionError(f"{name} and {ends_name} belong together; give both or neither")
    checked_ends, count = _integers(ends_name, ends, (size,)), len(np.asarray(pieces))
    if (np.diff(checked_ends, prepend=0) < 0).any() or (checked_ends[-1] if size else 0) != count:
        raise ProjectionError(f"{ends_name} must ascend from 0 to {count}, the number of {name}")
    ids = _integers(name, pieces, (count,))
    outside = np.flatnonzero((ids < 0) | (ids >= limit))
    if len(outside):
        raise ProjectionError(f"{name}[{outside[0]}] is {ids[outside[0]]}, outside [0, {limit})")
    return {name: ids.astype(np.int32), ends_name: checked_ends.astype(np.int32)}
