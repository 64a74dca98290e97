"""The projection R of a student's vocabulary onto a teacher's (METHODS §2)."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_opd.alignment.backend import fingerprint
from nemo_opd.errors import ProjectionError
from nemo_opd.projection import io

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ROW_SUM_TOLERANCE = 1e-4
"""float32 weights of a row sum to 1 within K · 6e-8; the rest is room for weights written with few digits."""


@dataclass(frozen=True, slots=True, eq=False, init=False)
class ProjectionMatrix:
    """Row-stochastic [V, W] with at most K entries a row: a student token → the teacher tokens that spell it."""

    indices: NDArray[np.int32]
    """[V, K]: teacher ids, distinct in a row; −1 is empty."""
    weights: NDArray[np.float32]
    """[V, K]: ≥ 0, of sum 1 in a row that has entries; 0 where empty."""
    exact: NDArray[np.bool_]
    """[V]: the row's one entry has the same bytes or role and is no other exact row's entry."""
    teacher_vocab_size: int
    student_fingerprint: str
    teacher_fingerprint: str
    student_name: str
    teacher_name: str

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
    ) -> None:
        """`exact` is a claim of who built the arrays: no row is exact when not given.

        `teacher_vocab_size` (largest id + 1) is the largest index + 1 when not given, which is too small where the
        last teacher ids are reached by no row. Raises ProjectionError for arrays that are no such matrix.
        """
        checked_indices, checked_weights = _arrays(indices, weights)
        rows = len(checked_indices)
        size = int(checked_indices.max(initial=-1)) + 1 if teacher_vocab_size is None else int(teacher_vocab_size)
        flags = np.zeros(rows, np.bool_) if exact is None else np.asarray(exact)
        _check_rows(checked_indices, checked_weights, size)
        _check_exact(flags, checked_indices)
        values = (
            ("indices", checked_indices.astype(np.int32)),
            ("weights", checked_weights.astype(np.float32)),
            ("exact", flags),
            ("teacher_vocab_size", size),
            ("student_fingerprint", student_fingerprint),
            ("teacher_fingerprint", teacher_fingerprint),
            ("student_name", student_name),
            ("teacher_name", teacher_name),
        )
        for name, value in values:
            object.__setattr__(self, name, value)

    @property
    def student_vocab_size(self) -> int:
        """V: one row a student id."""
        return len(self.indices)

    @property
    def top_k(self) -> int:
        """K"""
        return self.indices.shape[1]

    @property
    def row_lengths(self) -> NDArray[np.int64]:
        """[V]: entries of a row; 0 is an empty row."""
        return (self.indices >= 0).sum(axis=1)

    def save(self, path: str | PathLike[str]) -> None:
        """Write one safetensors file, complete or not at all. Raises ProjectionError where that is impossible."""
        header = io.Header(
            student_vocab_size=self.student_vocab_size,
            teacher_vocab_size=self.teacher_vocab_size,
            student_fingerprint=self.student_fingerprint,
            teacher_fingerprint=self.teacher_fingerprint,
            student_name=self.student_name,
            teacher_name=self.teacher_name,
        )
        io.write(path, header, io.Arrays(self.indices, self.weights, self.exact))

    @classmethod
    def load(
        cls,
        path: str | PathLike[str],
        student_tokenizer: PreTrainedTokenizerBase | None = None,
        teacher_tokenizer: PreTrainedTokenizerBase | None = None,
    ) -> ProjectionMatrix:
        """Read what `save` wrote, and check that it belongs to the tokenizers given.

        Raises ProjectionError for a file that is missing, damaged, of another version or of another pair.
        """
        header, arrays = io.read(path)
        if arrays.indices.shape[:1] != (header.student_vocab_size,):
            raise ProjectionError(
                f"{path} has indices {arrays.indices.shape} and a header for {header.student_vocab_size} rows; "
                "build it again"
            )
        _check_pair(path, "student", header.student_fingerprint, student_tokenizer)
        _check_pair(path, "teacher", header.teacher_fingerprint, teacher_tokenizer)
        try:
            return cls(
                arrays.indices,
                arrays.weights,
                arrays.exact,
                teacher_vocab_size=header.teacher_vocab_size,
                student_fingerprint=header.student_fingerprint,
                teacher_fingerprint=header.teacher_fingerprint,
                student_name=header.student_name,
                teacher_name=header.teacher_name,
            )
        except ProjectionError as error:
            raise ProjectionError(f"{path} holds no projection: {error}") from None


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
    _refuse(used.any(axis=1) & (np.abs(sums - 1) > ROW_SUM_TOLERANCE), "has weights whose sum is not 1")


def _refuse(bad: NDArray[np.bool_], what: str) -> None:
    if bad.any():
        raise ProjectionError(f"row {int(np.argwhere(bad)[0][0])} {what}")


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
        "build the projection of this pair with tools/projection/build.py, or use projection: auto"
    )
