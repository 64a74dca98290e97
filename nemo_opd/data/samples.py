"""A document's token ids for the student and every teacher, the bytes of each token, and the alignment.

Positions are S for the student and T for a teacher, as in nemo_opd.types; a sample has no padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.documents import Document
from nemo_opd.errors import DataError
from nemo_opd.types import HISTORY_CHANGED, HISTORY_REWRITTEN, HISTORY_SAME, Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Scalar = TypeVar("_Scalar", bound=np.generic)
_ALLOWED_HISTORY: dict[EqualHistory, int] = {"none": HISTORY_CHANGED, "text": HISTORY_REWRITTEN, "bytes": HISTORY_SAME}
"""The most by which what two sides have read may differ before a chunk that is compared."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence of one tokenizer, all arrays of its length."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """Tokens to be learned. False at position 0, which no logits predict."""
    num_bytes: NDArray[np.int32]
    """Bytes of content a token stands for; 0 for special tokens and for a template's own text."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The alignment of one text; −1: no partner, or in a chunk that no loss may use. Other ids do not decrease."""

    student: NDArray[np.int32]
    """[S]"""
    teacher: NDArray[np.int32]
    """[T]"""
    changed_from: int
    """The first chunk after contents that the two sides read differently; beyond all ids where there is none."""
    stop: int
    """The first chunk that is not compared, for what the sides have read before it; beyond all ids for none."""
    marks: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Chunks of two tokens of one role, whose bytes may differ: a mark such as `<think>` may be text on one side and
    special, without bytes, on the other.
    """

    @property
    def compared(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """[S] and [T]: the ids of the chunks that losses use; −1 elsewhere."""
        ours, theirs = (np.where(ids < self.stop, ids, np.int32(-1)) for ids in (self.student, self.teacher))
        return ours, theirs

    @property
    def histories(self) -> tuple[int, int]:
        """Usable chunks, and those of them after contents that the two sides read differently."""
        used = np.unique(self.student[self.student >= 0])
        return len(used), int((used >= self.changed_from).sum())


@dataclass(frozen=True, slots=True)
class TeacherSample:
    tokens: Tokens
    chunks: Chunks | None
    """None where the teacher shares the student's tokenizer; `tokens` are then the student's, but for those that the
    teacher does not have, and for its own prompt.
    """
    moved_by: int | None = None
    """Place of a token that both read among `tokens`, less its place among the student's, where the teacher shares the
    tokenizer and has its own prompt; None without one.
    """
    leakage: tuple[int, int] | None = None
    """Bytes of the response that also stand in the teacher's context, and its bytes; None without a context."""
    variants: tuple[Tokens, ...] = ()
    """The same response without the context and with another record's, where the privilege gap is measured."""

    def at_student(self, values: NDArray[_Scalar], length: int) -> NDArray[_Scalar]:
        """Return values [T] of the teacher's tokens at the student's positions: [length]; 0 where it reads nothing."""
        return _moved(values, -(self.moved_by or 0), length)

    def at_teacher(self, values: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Return values [S] of the student's tokens at the teacher's positions: [T]; 0 in its own prompt."""
        return _moved(values, self.moved_by or 0, len(self.tokens))


def _moved(values: NDArray[_Scalar], by: int, length: int) -> NDArray[_Scalar]:
    out = np.zeros(length, values.dtype)
    start, stop = max(0, by), min(length, by + len(values))
    if start < stop:
        out[start:stop] = values[start - by : stop - by]
    return out


@dataclass(frozen=True, slots=True)
class Sample:
    student: Tokens
    teachers: tuple[TeacherSample, ...]
    route: int | None = None
    """The one teacher that it is for; None for all."""


class Aligner(Protocol):
    """nemo_opd.alignment.TokenAligner, or anything with its methods."""

    @property
    def fingerprint(self) -> str: ...

    def align(self, student_ids: NDArray[np.int32], teacher_ids: NDArray[np.int32]) -> Alignment: ...


@dataclass(frozen=True)
class SameTokenizer:
    """A teacher that reads the student's ids, but for those that it does not have."""

    lacking: tuple[int, ...] = ()
    """Ids of the student that are no tokens of the teacher: nothing is learned from it where they stand."""
    substitute: int = 0
    """Id that the teacher reads in their place, where its embeddings may have no row."""

    @property
    def identity(self) -> tuple[object, ...] | None:
        return (self.lacking, self.substitute) if self.lacking else None

    def sample(self, student: Tokens) -> TeacherSample:
        """Return the teacher's tokens: the student's own where the teacher has all of them."""
        is_lacking = np.isin(student.ids, self.lacking)
        if not is_lacking.any():
            return TeacherSample(student, None)
        ids = np.where(is_lacking, np.int32(self.substitute), student.ids)
        return TeacherSample(Tokens(ids, student.loss_mask & ~is_lacking, student.num_bytes), None)


class SampleMaker(Protocol):
    """Document → Sample. Picklable, so that loader workers can hold one."""

    @property
    def identity(self) -> str:
        """Everything that decides what comes out for a document."""
        ...

    def __call__(self, document: Document, /) -> Sample: ...


class WindowMaker(Protocol):
    """Document → its windows, one for a document that all models read at a time. Picklable as a SampleMaker is."""

    @property
    def identity(self) -> str: ...

    def __call__(self, document: Document, /) -> tuple[Sample, ...]: ...


class HasIdentity(Protocol):
    """The student's or a teacher's side of a sample maker."""

    @property
    def identity(self) -> object:
        """Settings that decide what the side makes of a document, or None, with an exact `repr`."""
        ...


def identity_of(kind: str, student: HasIdentity, teachers: Sequence[HasIdentity]) -> str:
    """Return the identity of a sample maker with these settings."""
    return repr((kind, student.identity, [teacher.identity for teacher in teachers]))


def exact_length(alignment: Alignment) -> int:
    """Return the number of the teacher's tokens through its last exact chunk: nothing after it is compared.

    Where both sides end differently, one of them cut, an inexact chunk reaches to both ends.
    """
    return int(alignment.bounds[~alignment.inexact, 3].max(initial=0))


def usable_chunks(alignment: Alignment, student: Tokens, teacher: Tokens, equal_history: EqualHistory) -> Chunks:
    """Find the exact chunks all of whose tokens are scored, and are within `student` and `teacher`.

    Either may be shorter than what was aligned. equal_history: what both sides must have read in common before a chunk
    that is compared.
    """
    usable = ~alignment.inexact
    for tokens, (start, stop) in ((student, alignment.bounds[:, :2].T), (teacher, alignment.bounds[:, 2:].T)):
        learned = np.concatenate(([0], np.cumsum(tokens.loss_mask, dtype=np.int32)))
        inside = stop <= len(tokens)
        usable &= inside
        usable[inside] &= learned[stop[inside]] - learned[start[inside]] == stop[inside] - start[inside]

    def kept(chunk_id: NDArray[np.int32]) -> NDArray[np.int32]:
        # Without a chunk every id is −1; with one, −1 looks up the last chunk and stays −1 either way.
        return np.where(usable[chunk_id], chunk_id, np.int32(-1)) if len(usable) else chunk_id

    def after(history: int) -> int:
        return int(np.searchsorted(alignment.history, history, "right"))

    return Chunks(
        kept(alignment.student_chunk_id[: len(student)]),
        kept(alignment.teacher_chunk_id[: len(teacher)]),
        changed_from=after(HISTORY_REWRITTEN),
        stop=after(_ALLOWED_HISTORY[equal_history]),
        marks=np.flatnonzero(alignment.special).astype(np.int32),
    )


def require_ids(ids: NDArray[np.int32], vocab_size: int, tokenizer: PreTrainedTokenizerBase, content: str) -> None:
    """Raise DataError for a document with a token that the model cannot read."""
    if ids.max(initial=0) >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(int(ids.max()))
        raise DataError(
            f"a document holds {token!r}, for which the model has no embedding; take it out of {content[:60]!r}…"
        )
