"""Texts to samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.beginning import encode_beginning
from nemo_opd.data.documents import Document
from nemo_opd.data.encoders import Encoder, Encoding
from nemo_opd.data.samples import (
    Aligner,
    SameTokenizer,
    Sample,
    TeacherSample,
    Tokens,
    exact_length,
    identity_of,
    usable_chunks,
)

if TYPE_CHECKING:
    pass


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
        """Cut the text to the student's length; a teacher reads as much of it, as far as its own length goes.

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
    """Make a teacher's sample. whole: the text of the student's tokens. Their bytes say nothing of the teacher's, whose
    tokenizer may rewrite the text in another way.
    """
    alignment = teacher.aligner.align(student.ids, whole.ids)
    last = exact_length(alignment) if is_cut else len(whole.ids)
    tokens = whole.cut(min(last, teacher.encoder.max_length)).tokens()
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
