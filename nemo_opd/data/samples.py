"""A text as the student and every teacher see it: token ids, their bytes, and the alignment.

Positions are S for the student and T for a teacher, as in nemo_opd.types; a sample has no padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import pieces_of
from nemo_opd.errors import DataError
from nemo_opd.types import Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Aligner(Protocol):
    """nemo_opd.alignment.TokenAligner, or anything with its method."""

    def align(self, student_ids: NDArray[np.int32], teacher_ids: NDArray[np.int32]) -> Alignment: ...


@dataclass(frozen=True, slots=True)
class Tokens:
    """One sequence of one tokenizer, all arrays of its length."""

    ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    """False at position 0, which no logits predict."""
    num_bytes: NDArray[np.int32]
    """Bytes of text a token stands for; 0 for special tokens."""

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True)
class Chunks:
    """The alignment of one text; −1: no partner, or in a chunk that no loss may use."""

    student: NDArray[np.int32]
    """[S]"""
    teacher: NDArray[np.int32]
    """[T]"""


@dataclass(frozen=True, slots=True)
class TeacherSample:
    tokens: Tokens
    chunks: Chunks | None
    """None where the teacher shares the student's tokenizer; `tokens` are then the student's."""


@dataclass(frozen=True, slots=True)
class Sample:
    student: Tokens
    teachers: tuple[TeacherSample, ...]


@dataclass(frozen=True, slots=True)
class Encoding:
    """The whole of a text, before anything is cut."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    """Bytes of text up to the end of each token."""

    def starts(self) -> NDArray[np.int64]:
        """Bytes of text before each token."""
        return np.concatenate(([0], self.ends[:-1])) if len(self.ends) else self.ends

    def cut(self, length: int) -> Encoding:
        return Encoding(self.ids[:length], self.ends[:length])

    def tokens(self) -> Tokens:
        return Tokens(self.ids, np.arange(len(self.ids)) > 0, np.diff(self.ends, prepend=0).astype(np.int32))


@dataclass(frozen=True)
class Encoder:
    """A tokenizer's view of a text: its default special tokens, and the end-of-sequence token behind."""

    tokenizer: PreTrainedTokenizerBase
    lengths: NDArray[np.int32]
    """[V]: bytes of text per id, 0 for special tokens (METHODS §1)."""
    max_length: int
    append_eos: bool

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, max_length: int, append_eos: bool, vocab_size: int | None = None
    ) -> Self:
        """`vocab_size`: ids the model can read, all by default. Raises AlignmentError where tokens lack exact bytes."""
        return cls(tokenizer, pieces_of(tokenizer).lengths[:vocab_size], max_length, append_eos)

    def __call__(self, text: str) -> Encoding:
        """The text's tokens, uncut. A tokenizer without an end-of-sequence token appends none.

        Raises DataError for a text with a token that the model cannot read.
        """
        # The call switches off what truncation and padding a tokenizer file asks for; verbose would warn of long texts.
        encoded = self.tokenizer(text, return_attention_mask=False, verbose=False)
        ids: list[int] = list(encoded["input_ids"])
        eos = self.tokenizer.eos_token_id
        if self.append_eos and eos is not None and (not ids or ids[-1] != eos):
            ids.append(eos)
        array = np.asarray(ids, dtype=np.int32)
        if array.max(initial=0) >= len(self.lengths):
            token = self.tokenizer.convert_ids_to_tokens(int(array.max()))
            raise DataError(
                f"a document holds {token!r}, for which the model has no embedding; take it out of {text[:60]!r}…"
            )
        return Encoding(array, np.cumsum(self.lengths[array], dtype=np.int64))


@dataclass(frozen=True)
class SameTokenizer:
    """A teacher that reads the student's ids."""


@dataclass(frozen=True)
class CrossTokenizer:
    """A teacher that reads its own ids."""

    encoder: Encoder
    aligner: Aligner


@dataclass(frozen=True)
class SampleMaker:
    """Text → Sample. Picklable where the tokenizers and aligners are, so that loader workers can hold one."""

    student: Encoder
    teachers: tuple[SameTokenizer | CrossTokenizer, ...]

    def __call__(self, text: str) -> Sample:
        """The text cut to each side's length; a teacher keeps no token that starts where a cut student ends.

        Raises AlignmentError from the aligners.
        """
        whole = self.student(text)
        kept = whole.cut(self.student.max_length)
        student = kept.tokens()
        is_cut = len(kept.ids) < len(whole.ids)
        num_bytes = int(kept.ends[-1]) if is_cut else None
        return Sample(student, tuple(_teacher_sample(text, student, num_bytes, teacher) for teacher in self.teachers))


def _teacher_sample(
    text: str, student: Tokens, num_bytes: int | None, teacher: SameTokenizer | CrossTokenizer
) -> TeacherSample:
    if isinstance(teacher, SameTokenizer):
        return TeacherSample(student, None)
    whole = teacher.encoder(text)
    inside = len(whole.ids) if num_bytes is None else int(np.searchsorted(whole.starts(), num_bytes, side="left"))
    tokens = whole.cut(min(inside, teacher.encoder.max_length)).tokens()
    return TeacherSample(tokens, _usable_chunks(teacher.aligner.align(student.ids, tokens.ids)))


def _usable_chunks(alignment: Alignment) -> Chunks:
    def usable(chunk_id: NDArray[np.int32]) -> NDArray[np.int32]:
        if not alignment.num_chunks:
            return chunk_id
        # Id −1 looks up the last chunk, and stays −1 either way.
        return np.where(alignment.inexact[chunk_id], np.int32(-1), chunk_id)

    return Chunks(usable(alignment.student_chunk_id), usable(alignment.teacher_chunk_id))
