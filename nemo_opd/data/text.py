"""Texts to samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import Pieces, fingerprint, pieces_of
from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.beginning import encode_beginning
from nemo_opd.data.documents import Document
from nemo_opd.data.samples import (
    Aligner,
    SameTokenizer,
    Sample,
    TeacherSample,
    Tokens,
    exact_length,
    identity_of,
    require_ids,
    usable_chunks,
)

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase


@dataclass(frozen=True, slots=True)
class Encoding:
    """The whole of a text, before anything is cut."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    """Bytes of text up to the end of each token."""

    def cut(self, length: int) -> Encoding:
        return Encoding(self.ids[:length], self.ends[:length])

    def tokens(self) -> Tokens:
        return Tokens(self.ids, np.arange(len(self.ids)) > 0, np.diff(self.ends, prepend=0).astype(np.int32))


@dataclass(frozen=True)
class Encoder:
    """A tokenizer's view of a text: its default special tokens, and the end-of-sequence token behind."""

    tokenizer: PreTrainedTokenizerBase
    pieces: Pieces
    lengths: NDArray[np.int32]
    """[V]: bytes of text per id that the model can read, 0 for special tokens (METHODS §1)."""
    max_length: int
    append_eos: bool

    @classmethod
    def of(
        cls, tokenizer: PreTrainedTokenizerBase, max_length: int, append_eos: bool, vocab_size: int | None = None
    ) -> Self:
        """`vocab_size`: ids the model can read, all by default. Raises AlignmentError where tokens lack exact bytes."""
        pieces = pieces_of(tokenizer)
        return cls(tokenizer, pieces, pieces.lengths[:vocab_size], max_length, append_eos)

    @property
    def identity(self) -> tuple[object, ...]:
        eos = self.tokenizer.eos_token_id if self.append_eos else None
        return fingerprint(self.tokenizer), eos, self.max_length, len(self.lengths)

    def __call__(self, text: str) -> Encoding:
        """The text's tokens, uncut. A tokenizer without an end-of-sequence token appends none.

        Raises DataError for a text with a token that the model cannot read.
        """
        return self._encoding(self._encoded(text), text)

    def located(self, text: str) -> tuple[Encoding, NDArray[np.int64]]:
        """The same, and [S]: the first character of each token, which do not decrease."""
        encoded = self._encoded(text, return_offsets_mapping=True)
        encoding = self._encoding(encoded, text)
        starts = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[:, 0]
        appended = np.full(len(encoding.ids) - len(starts), len(text), np.int64)
        return encoding, np.maximum.accumulate(np.concatenate((starts, appended)))

    def _encoded(self, text: str, **options: bool) -> BatchEncoding:
        # The call switches off what truncation and padding a tokenizer file asks for; verbose would warn of long texts.
        return self.tokenizer(text, return_attention_mask=False, verbose=False, **options)

    def _encoding(self, encoded: BatchEncoding, text: str) -> Encoding:
        ids: list[int] = list(encoded["input_ids"])
        eos = self.tokenizer.eos_token_id
        if self.append_eos and eos is not None and (not ids or ids[-1] != eos):
            ids.append(eos)
        array = np.asarray(ids, dtype=np.int32)
        require_ids(array, len(self.lengths), self.tokenizer, text)
        return Encoding(array, np.cumsum(self.lengths[array], dtype=np.int64))


@dataclass(frozen=True)
class CrossTokenizer:
    """A teacher that reads its own ids."""

    encoder: Encoder
    aligner: Aligner
    equal_history: EqualHistory = "text"


@dataclass(frozen=True)
class TextSampleMaker:
    """Text → Sample."""

    student: Encoder
    teachers: tuple[SameTokenizer | CrossTokenizer, ...]

    @property
    def identity(self) -> str:
        return identity_of("text", self.student, self.teachers)

    def __call__(self, text: Document) -> Sample:
        """The text cut to the student's length; a teacher reads as much of it, as far as its own length goes.

        It keeps nothing behind the last chunk of a cut student. Of a long text only the beginning is tokenized.

        Raises AlignmentError from the aligners, DataError for a text with a token that a model cannot read.
        """
        assert isinstance(text, str)
        readers = [teacher.encoder for teacher in self.teachers if isinstance(teacher, CrossTokenizer)]
        whole, *others = encode_beginning(self.student, readers, text, self.student.max_length)
        kept = whole.cut(self.student.max_length)
        student = kept.tokens()
        is_cut = len(kept.ids) < len(whole.ids)
        unread = iter(others)
        return Sample(
            student,
            tuple(
                teacher.sample(student)
                if isinstance(teacher, SameTokenizer)
                else teacher_sample(next(unread), student, is_cut, teacher)
                for teacher in self.teachers
            ),
        )


def teacher_sample(whole: Encoding, student: Tokens, is_cut: bool, teacher: CrossTokenizer) -> TeacherSample:
    """whole: holds all that the student's tokens stand for. Their number of bytes says nothing of the teacher's, whose
    tokenizer may rewrite the text in another way.
    """
    alignment = teacher.aligner.align(student.ids, whole.ids)
    last = exact_length(alignment) if is_cut else len(whole.ids)
    tokens = whole.cut(min(last, teacher.encoder.max_length)).tokens()
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
