"""A document's token ids for the student and every teacher, the bytes of each token, and the alignment.

Positions are S for the student and T for a teacher, as in nemo_opd.types; samples are not padded.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load, save

from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.row_types import Document
from nemo_opd.errors import DataError
from nemo_opd.types import HISTORY_CHANGED, HISTORY_REWRITTEN, HISTORY_SAME, Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_Scalar = TypeVar("_Scalar", bound=np.generic)
_Result_co = TypeVar("_Result_co", covariant=True)
_ALLOWED_HISTORY: dict[EqualHistory, int] = {"none": HISTORY_CHANGED, "text": HISTORY_REWRITTEN, "bytes": HISTORY_SAME}
"""Largest difference allowed between the contents that two sides have read before a compared chunk."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence of one tokenizer. All arrays have its length."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """Tokens to learn. False at position 0, which no logits predict."""
    num_bytes: NDArray[np.int32]
    """Bytes of content per token; 0 for special tokens and for a template's own text."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The alignment of one text. −1: no partner, or in a chunk that no loss may use. Other ids are non-decreasing."""

    student: NDArray[np.int32]
    """[S]"""
    teacher: NDArray[np.int32]
    """[T]"""
    changed_from: int
    """First chunk after contents that the two sides read differently; beyond all ids if they never differ."""
    stop: int
    """First chunk that is excluded because the sides have read different contents before it; beyond all ids if none is.
    """
    marks: NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Chunks of two tokens of one role, whose bytes may differ: a mark such as `<think>` may be text on one side, and
    special, without bytes, on the other.
    """

    @property
    def compared(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """[S] and [T]: ids of the chunks that losses use; −1 elsewhere."""
        ours, theirs = (np.where(ids < self.stop, ids, np.int32(-1)) for ids in (self.student, self.teacher))
        return ours, theirs

    @property
    def histories(self) -> tuple[int, int]:
        """Number of usable chunks, and how many of them follow contents that the two sides read differently."""
        used = np.unique(self.student[self.student >= 0])
        return len(used), int((used >= self.changed_from).sum())


@dataclass(frozen=True, slots=True)
class TeacherSample:
    tokens: Tokens
    chunks: Chunks | None
    """None if the teacher shares the student's tokenizer. `tokens` are then the student's, except for the teacher's own
    prompt and for tokens that it lacks.
    """
    moved_by: int | None = None
    """Position in `tokens` of a token that both read, less its position in the student's, if the teacher shares the
    tokenizer and has its own prompt; otherwise None.
    """
    leakage: tuple[int, int] | None = None
    """Bytes of the response that also occur in the teacher's context, and all its bytes; None without a context."""
    variants: tuple[Tokens, ...] = ()
    """The response without the context and with another record's, if the privilege gap is measured."""

    def at_student(self, values: NDArray[_Scalar], length: int) -> NDArray[_Scalar]:
        """Move values [T] of the teacher's tokens to the student's positions, [length]; 0 for unread positions."""
        return _moved(values, -(self.moved_by or 0), length)

    def at_teacher(self, values: NDArray[_Scalar]) -> NDArray[_Scalar]:
        """Move values [S] of the student's tokens to the teacher's positions, [T]; 0 in the teacher's own prompt."""
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
    """Index of the only teacher that the sample is for; None for all."""


@dataclass(frozen=True)
class SameTokenizer:
    """A teacher that reads the student's ids, except those that it lacks."""

    lacking: tuple[int, ...] = ()
    """The student's ids that are not tokens of the teacher; nothing is learned from the teacher at these."""
    substitute: int = 0
    """Id that the teacher reads in their place, as its embeddings may lack their rows."""

    @property
    def identity(self) -> tuple[object, ...] | None:
        return (self.lacking, self.substitute) if self.lacking else None

    def sample(self, student: Tokens) -> TeacherSample:
        """Return the teacher's sample: the student's own tokens if the teacher has all of them."""
        is_lacking = np.isin(student.ids, self.lacking)
        if not is_lacking.any():
            return TeacherSample(student, None)
        ids = np.where(is_lacking, np.int32(self.substitute), student.ids)
        return TeacherSample(Tokens(ids, student.loss_mask & ~is_lacking, student.num_bytes), None)


class Maker(Protocol[_Result_co]):
    """A maker of samples from documents. Picklable, so that loader workers can hold one."""

    @property
    def identity(self) -> str:
        """All settings that determine the result for a document."""
        ...

    def __call__(self, document: Document, /) -> _Result_co: ...


SampleMaker = Maker[Sample]
WindowMaker = Maker[tuple[Sample, ...]]
"""A maker of a document's windows: one if all models can read the document at once."""


class HasIdentity(Protocol):
    """The student's or a teacher's side of a sample maker."""

    @property
    def identity(self) -> object:
        """Settings that determine the side's part of a sample, or None, with an exact `repr`."""
        ...


def identity_of(kind: str, student: HasIdentity, teachers: Sequence[HasIdentity]) -> str:
    """Return the identity of a sample maker with these sides."""
    return repr((kind, student.identity, [teacher.identity for teacher in teachers]))


def exact_length(alignment: Alignment) -> int:
    """Return the number of teacher tokens through the last exact chunk; later tokens are not compared.

    If the sides end differently because one of them is cut, an inexact chunk reaches to both ends.
    """
    return int(alignment.bounds[~alignment.inexact, 3].max(initial=0))


def usable_chunks(alignment: Alignment, student: Tokens, teacher: Tokens, equal_history: EqualHistory) -> Chunks:
    """Find the exact chunks whose tokens are all scored and all within `student` and `teacher`.

    Either may be shorter than the aligned tokens. equal_history: what both sides must have read alike before a chunk.
    """
    usable = ~alignment.inexact
    for tokens, (start, stop) in ((student, alignment.bounds[:, :2].T), (teacher, alignment.bounds[:, 2:].T)):
        learned = np.concatenate(([0], np.cumsum(tokens.loss_mask, dtype=np.int32)))
        inside = stop <= len(tokens)
        usable &= inside
        usable[inside] &= learned[stop[inside]] - learned[start[inside]] == stop[inside] - start[inside]

    def only_usable(chunk_id: NDArray[np.int32]) -> NDArray[np.int32]:
        # Without chunks every id is −1. Otherwise −1 looks up the last chunk and stays −1 either way.
        return np.where(usable[chunk_id], chunk_id, np.int32(-1)) if len(usable) else chunk_id

    def after(history: int) -> int:
        return int(np.searchsorted(alignment.history, history, "right"))

    return Chunks(
        only_usable(alignment.student_chunk_id[: len(student)]),
        only_usable(alignment.teacher_chunk_id[: len(teacher)]),
        changed_from=after(HISTORY_REWRITTEN),
        stop=after(_ALLOWED_HISTORY[equal_history]),
        marks=np.flatnonzero(alignment.special).astype(np.int32),
    )


def require_ids(ids: NDArray[np.int32], vocab_size: int, tokenizer: PreTrainedTokenizerBase, content: str) -> None:
    """Raise DataError if a document has a token that the model cannot read."""
    if ids.max(initial=0) >= vocab_size:
        token = tokenizer.convert_ids_to_tokens(int(ids.max()))
        raise DataError(
            f"a document holds {token!r}, for which the model has no embedding; remove it from {content[:60]!r}…"
        )


def encoded(samples: Sequence[Sample]) -> bytes:
    """Serialize samples as compressed arrays, keyed by the sample's index and the array's name."""
    arrays = {
        f"{k}/{name}": np.ascontiguousarray(array)
        for k, sample in enumerate(samples)
        for name, array in _arrays(sample).items()
    }
    return zlib.compress(save(arrays), level=1)


def decoded(value: bytes) -> tuple[Sample, ...]:
    """Reverse `encoded`. Raises zlib.error, SafetensorError, KeyError or ValueError for other bytes."""
    by_sample: dict[int, dict[str, NDArray[Any]]] = defaultdict(dict)
    for path, array in load(zlib.decompress(value)).items():
        number, _, name = path.partition("/")
        by_sample[int(number)][name] = array
    return tuple(_sample(by_sample[k]) for k in range(len(by_sample)))


def _arrays(sample: Sample) -> dict[str, NDArray[Any]]:
    arrays = _named(sample.student, "student")
    for i, teacher in enumerate(sample.teachers):
        arrays[f"{i}.cross"] = np.array(teacher.chunks is not None)
        if teacher.tokens is not sample.student:
            arrays |= _named(teacher.tokens, f"{i}")
        if teacher.chunks is not None:
            arrays |= {f"{i}.student_chunk": teacher.chunks.student, f"{i}.teacher_chunk": teacher.chunks.teacher}
            arrays[f"{i}.marks"] = teacher.chunks.marks
            arrays |= {f"{i}.limits": np.array([teacher.chunks.changed_from, teacher.chunks.stop])}
        if teacher.moved_by is not None:
            arrays[f"{i}.moved_by"] = np.array(teacher.moved_by)
        if teacher.leakage is not None:
            arrays[f"{i}.leakage"] = np.array(teacher.leakage)
        for k, tokens in enumerate(teacher.variants):
            arrays |= _named(tokens, f"{i}.variants.{k}")
    return arrays


def _sample(arrays: dict[str, NDArray[Any]]) -> Sample:
    student = _tokens(arrays, "student")
    num_teachers = sum(name.endswith(".cross") for name in arrays)

    def teacher(i: int) -> TeacherSample:
        tokens = _tokens(arrays, f"{i}") if f"{i}.ids" in arrays else student
        moved_by = arrays[f"{i}.moved_by"].item() if f"{i}.moved_by" in arrays else None
        leakage = tuple(arrays[f"{i}.leakage"].tolist()) if f"{i}.leakage" in arrays else None
        num_variants = sum(name.startswith(f"{i}.variants.") and name.endswith(".ids") for name in arrays)
        variants = tuple(_tokens(arrays, f"{i}.variants.{k}") for k in range(num_variants))
        return TeacherSample(tokens, _chunks(arrays, i), moved_by, leakage, variants)

    return Sample(student, tuple(teacher(i) for i in range(num_teachers)))


def _chunks(arrays: dict[str, NDArray[Any]], i: int) -> Chunks | None:
    if not arrays[f"{i}.cross"]:
        return None
    changed_from, stop = arrays[f"{i}.limits"].tolist()
    ours, theirs, marks = (arrays[f"{i}.{name}"] for name in ("student_chunk", "teacher_chunk", "marks"))
    return Chunks(ours, theirs, changed_from, stop, marks)


def _named(side: Tokens, name: str) -> dict[str, NDArray[Any]]:
    return {f"{name}.ids": side.ids, f"{name}.loss_mask": side.loss_mask, f"{name}.num_bytes": side.num_bytes}


def _tokens(arrays: dict[str, NDArray[Any]], name: str) -> Tokens:
    return Tokens(arrays[f"{name}.ids"], arrays[f"{name}.loss_mask"], arrays[f"{name}.num_bytes"])
