"""Projection of a student's vocabulary onto a teacher's (methods.md §2)."""

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
from nemo_opd.projection.io import BuilderOptions

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Importer = Callable[
    ["str | PathLike[str]", "PreTrainedTokenizerBase | None", "PreTrainedTokenizerBase | None"], "ProjectionMatrix"
]
IMPORTERS: dict[str, _Importer] = {}
"""File suffix → reader of a foreign format, registered by the reader's module."""
_ROW_SUM_TOLERANCE = 1e-4
"""float32 weights of a row sum to 1 within K · 6e-8; the tolerance also admits weights written with few digits."""


@dataclass(frozen=True, slots=True, eq=False, init=False)
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
        teacher_byte_order: ArrayLike | None = None,
        teacher_spellings: ArrayLike | None = None,
        teacher_spelling_ends: ArrayLike | None = None,
        teacher_prefix_pieces: ArrayLike | None = None,
        teacher_prefix_ends: ArrayLike | None = None,
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
        if (student_shared_prefix is None) != (teacher_shared_prefix is None):
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
            "byte_prefix": _prefix_map("byte_prefix", byte_prefix, size, rows),
            "student_shared_prefix": _prefix_map("student_shared_prefix", student_shared_prefix, rows, num_shared),
            "teacher_shared_prefix": _prefix_map("teacher_shared_prefix", teacher_shared_prefix, size, num_shared),
            "teacher_byte_order": _byte_order(teacher_byte_order, size),
            **_pieces(
                "teacher_spellings", teacher_spellings, "teacher_spelling_ends", teacher_spelling_ends, size, rows
            ),
            **_pieces(
                "teacher_prefix_pieces", teacher_prefix_pieces, "teacher_prefix_ends", teacher_prefix_ends, size, rows
            ),
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


def _prefix_map(name: str, ids: ArrayLike | None, length: int, limit: int) -> NDArray[np.int32] | None:
    if ids is None:
        return None
    array = _integers(name, ids, (length,))
    outside = np.flatnonzero((array < -1) | (array >= limit))
    if len(outside):
        raise ProjectionError(f"{name}[{outside[0]}] is {array[outside[0]]}, outside [-1, {limit})")
    return array.astype(np.int32)


def _byte_order(values: ArrayLike | None, size: int) -> NDArray[np.int32] | None:
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


def _pieces(
    name: str, pieces: ArrayLike | None, ends_name: str, ends: ArrayLike | None, size: int, limit: int
) -> dict[str, NDArray[np.int32] | None]:
    """Check the pieces of `size` teacher tokens, with ids below `limit`."""
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
