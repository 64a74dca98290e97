"""Alignment of student and teacher ids that stand for one text (methods.md §1)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from nemo_opd.alignment.history import ReadText, chunk_histories, run_histories
from nemo_opd.alignment.merge import TEXT, PieceTable, Spelling, merge, spell
from nemo_opd.alignment.pieces import Pieces, pieces_of
from nemo_opd.alignment.resync import equal_runs
from nemo_opd.alignment.roles import RoleOverrides, pair_special_tokens
from nemo_opd.errors import AlignmentError
from nemo_opd.types import Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_VERSION = 3
"""Increment when the same ids are aligned differently."""


class TokenAligner:
    """An aligner for one pair of tokenizers. Holds only arrays: cheap to pickle, safe to share between threads."""

    def __init__(
        self,
        student_tokenizer: PreTrainedTokenizerBase,
        teacher_tokenizer: PreTrainedTokenizerBase,
        *,
        roles: RoleOverrides | None = None,
    ) -> None:
        """Prepare two tokenizers. roles: content → role or roles, added to or replacing roles of special tokens.

        Raises AlignmentError for a tokenizer whose pieces cannot be exact.
        """
        self.student_pieces = pieces_of(student_tokenizer)
        self.teacher_pieces = pieces_of(teacher_tokenizer)
        self._special = pair_special_tokens(
            student_tokenizer, teacher_tokenizer, self.student_pieces, self.teacher_pieces, roles
        )
        self._make_tables()

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines an alignment: both tokenizers, the roles, the version of the method."""
        digest = hashlib.sha256(
            f"{_VERSION} {self.student_pieces.fingerprint} {self.teacher_pieces.fingerprint}".encode()
        )
        for array in (self._special.student_class, self._special.teacher_class, self._special.matches):
            digest.update(array.tobytes())
        return digest.hexdigest()

    def align(
        self, student_ids: Sequence[int] | NDArray[np.integer], teacher_ids: Sequence[int] | NDArray[np.integer]
    ) -> Alignment:
        """Align two 1-D id sequences without padding, canonical or not. O(S + T).

        Raises AlignmentError for ids that are not a 1-D sequence of integers inside the vocabulary.
        """
        student, teacher = self.student_spelling(student_ids), self.teacher_spelling(teacher_ids)
        runs = equal_runs(student.data, teacher.data)
        chunks = merge(student, teacher, runs, self._matches)
        histories = run_histories(
            _read_text(student_ids, student, self.student_pieces, chunks.student_chunk_id),
            _read_text(teacher_ids, teacher, self.teacher_pieces, chunks.teacher_chunk_id),
            runs,
        )
        history = chunk_histories(chunks.bounds, (student.edges, teacher.edges), runs, histories)
        return Alignment(**chunks._asdict(), history=history)

    def student_spelling(self, ids: Sequence[int] | NDArray[np.integer]) -> Spelling:
        """Return the bytes of student ids. Raises AlignmentError as `align` does."""
        return spell(_valid_ids(ids, "student", self.student_pieces), self._student_table)

    def teacher_spelling(self, ids: Sequence[int] | NDArray[np.integer]) -> Spelling:
        """Return the bytes of teacher ids. Raises AlignmentError as `align` does."""
        return spell(_valid_ids(ids, "teacher", self.teacher_pieces), self._teacher_table)

    def _make_tables(self) -> None:
        special = self._special
        self._student_table = _table(special.student_class, self.student_pieces)
        self._teacher_table = _table(special.teacher_class, self.teacher_pieces)
        self._matches = _for_kernel(special.matches)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("student_pieces", "teacher_pieces", "_special")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._make_tables()


def _table(classes: NDArray[np.int32], pieces: Pieces) -> PieceTable:
    return PieceTable(_for_kernel(classes), _for_kernel(pieces.offsets), _for_kernel(pieces.buffer))


def _read_text(ids: ArrayLike, spelling: Spelling, pieces: Pieces, chunk_id: NDArray[np.int32]) -> ReadText:
    special = np.flatnonzero(spelling.classes != TEXT)
    contents = [pieces.content_of(token) for token in np.asarray(ids)[special].tolist()]
    is_outside = (chunk_id[special] >= 0) | (special == 0)
    return ReadText(spelling.data.tobytes(), spelling.edges[special], contents, is_outside.tolist())


def _for_kernel(array: NDArray[Any]) -> NDArray[Any]:
    """Return a writable array: Numba recompiles for read-only ones, from Ray's store or a mapped file."""
    return np.require(array, requirements=["C", "W"])


def _valid_ids(ids: ArrayLike, side: str, pieces: Pieces) -> NDArray[np.int64]:
    """Check ids and return them writable and contiguous, as the kernels are compiled for."""
    array = np.asarray(ids)
    if array.size == 0:
        array = array.astype(np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise AlignmentError(
            f"{side}_ids must be a 1-D sequence of integers, not {array.dtype} of shape {array.shape}; "
            "align one sequence at a time, without padding"
        )
    if array.size and (array.min() < 0 or array.max() >= pieces.vocab_size):
        position = int(np.flatnonzero((array < 0) | (array >= pieces.vocab_size))[0])
        raise AlignmentError(
            f"{side}_ids[{position}] is {array[position]}, outside the vocabulary of size {pieces.vocab_size}; "
            f"were these ids made by the {side}'s tokenizer?"
        )
    return np.require(array, np.int64, ["C", "W"])
