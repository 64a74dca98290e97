"""Texts to samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

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
from nemo_opd.data.windows import Places, common_places, window_edges


@dataclass(frozen=True)
class CrossTokenizer:
    """A teacher with its own tokenizer."""

    encoder: Encoder
    aligner: Aligner
    equal_history: EqualHistory = "text"

    @property
    def identity(self) -> tuple[object, ...]:
        return (*self.encoder.identity, self.aligner.fingerprint, self.equal_history)


@dataclass(frozen=True)
class TextSampleMaker:
    """A maker of samples from texts."""

    student: Encoder
    teachers: tuple[SameTokenizer | CrossTokenizer, ...]

    @property
    def identity(self) -> str:
        return identity_of("text", self.student, self.teachers)

    def __call__(self, text: Document) -> Sample:
        """Cut the text to the student's length; a teacher reads as much of the text, within its own length.

        If the student is cut, a teacher keeps nothing after the last exact chunk. Only the beginning of a long text is
        tokenized.

        Raises AlignmentError from the aligners, DataError for a text with a token that a model cannot read.
        """
        assert isinstance(text, str)
        readers = [teacher.encoder for teacher in self.crossing]
        student, *encodings = encode_beginning(self.student, readers, text, self.student.max_length)
        cut = student.cut(self.student.max_length)
        return self.sample(cut.tokens(), encodings, is_cut=len(cut.ids) < len(student.ids))

    @property
    def crossing(self) -> list[CrossTokenizer]:
        """Teachers with another tokenizer than the student."""
        return [teacher for teacher in self.teachers if isinstance(teacher, CrossTokenizer)]

    def sample(self, student: Tokens, encodings: Sequence[Encoding], *, is_cut: bool) -> Sample:
        """Make a sample. encodings: the text as `crossing` read it. is_cut: whether the student reads less of it."""
        unread = iter(encodings)
        return Sample(
            student,
            tuple(
                teacher.sample(student)
                if isinstance(teacher, SameTokenizer)
                else _teacher_sample(next(unread), student, is_cut, teacher)
                for teacher in self.teachers
            ),
        )


@dataclass(frozen=True)
class TextWindowMaker:
    """A maker of windows that cover all of a text on all sides (methods.md §8.6)."""

    make: TextSampleMaker

    @property
    def identity(self) -> str:
        return f"windows of {self.make.identity}"

    def __call__(self, text: Document) -> tuple[Sample, ...]:
        """Cut the text at token boundaries shared by all its models, into windows that fit each of them.

        Raises AlignmentError from the aligners, DataError for a text with a token that a model cannot read.
        """
        assert isinstance(text, str)
        encoders = [self.make.student, *(teacher.encoder for teacher in self.make.crossing)]
        encodings = [encoder(text) for encoder in encoders]
        windows = []
        for begins, ends in pairwise(self._edges(encoders, encodings).tolist()):
            sides = zip(encoders, encodings, begins, ends, strict=True)
            student, *teachers = (encoding.part(begin, end, encoder.opening) for encoder, encoding, begin, end in sides)
            windows.append(self.make.sample(student.tokens(), teachers, is_cut=False))
        return tuple(windows)

    def _edges(self, encoders: Sequence[Encoder], encodings: Sequence[Encoding]) -> Places:
        """Return the edges of windows, in each encoder's tokens."""
        ends = np.array([len(encoding.ids) for encoding in encodings])
        limits = [encoder.max_length for encoder in encoders]
        if (ends <= limits).all():
            return np.stack([np.zeros_like(ends), ends])
        student, *teacher_ids = (encoding.ids for encoding in encodings)
        readers = zip(self.make.crossing, teacher_ids, strict=True)
        bounds = [teacher.aligner.align(student, ids).bounds for teacher, ids in readers]
        places = common_places(len(student), [(chunks[:, 0], chunks[:, 2]) for chunks in bounds], ends)
        return window_edges(places, limits, [len(encoder.opening.ids) for encoder in encoders])


def _teacher_sample(encoding: Encoding, student: Tokens, is_cut: bool, teacher: CrossTokenizer) -> TeacherSample:
    """Make a teacher's sample. encoding: the text of the student's tokens.

    The student's byte counts do not apply: the teacher's tokenizer may rewrite the text differently.
    """
    alignment = teacher.aligner.align(student.ids, encoding.ids)
    last = exact_length(alignment) if is_cut else len(encoding.ids)
    tokens = encoding.cut(min(last, teacher.encoder.max_length)).tokens()
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
