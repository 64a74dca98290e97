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
    """A teacher that reads its own ids."""

    encoder: Encoder
    aligner: Aligner
    equal_history: EqualHistory = "text"

    @property
    def identity(self) -> tuple[object, ...]:
        return (*self.encoder.identity, self.aligner.fingerprint, self.equal_history)


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

        It keeps nothing after the last chunk of a cut student. Of a long text only the beginning is tokenized.

        Raises AlignmentError from the aligners, DataError for a text with a token that a model cannot read.
        """
        assert isinstance(text, str)
        readers = [teacher.encoder for teacher in self.crossing]
        whole, *others = encode_beginning(self.student, readers, text, self.student.max_length)
        kept = whole.cut(self.student.max_length)
        return self.sample(kept.tokens(), others, is_cut=len(kept.ids) < len(whole.ids))

    @property
    def crossing(self) -> list[CrossTokenizer]:
        """The teachers with another tokenizer."""
        return [teacher for teacher in self.teachers if isinstance(teacher, CrossTokenizer)]

    def sample(self, student: Tokens, others: Sequence[Encoding], *, is_cut: bool) -> Sample:
        """Make a sample. others: the text as each of `crossing` reads it; is_cut: the student reads less of it."""
        unread = iter(others)
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
    """Text → windows that use all of it, on all sides (methods.md §8.6)."""

    make: TextSampleMaker

    @property
    def identity(self) -> str:
        return f"windows of {self.make.identity}"

    def __call__(self, text: Document) -> tuple[Sample, ...]:
        """Cut the text where all its models begin a token, into windows that none of them needs to cut.

        Raises AlignmentError from the aligners, DataError for a text with a token that a model cannot read.
        """
        assert isinstance(text, str)
        encoders = [self.make.student, *(teacher.encoder for teacher in self.make.crossing)]
        wholes = [encoder(text) for encoder in encoders]
        windows = []
        for begins, ends in pairwise(self._edges(encoders, wholes).tolist()):
            sides = zip(encoders, wholes, begins, ends, strict=True)
            student, *others = (whole.part(begin, end, encoder.opening) for encoder, whole, begin, end in sides)
            windows.append(self.make.sample(student.tokens(), others, is_cut=False))
        return tuple(windows)

    def _edges(self, encoders: Sequence[Encoder], wholes: Sequence[Encoding]) -> Places:
        """Return where windows begin and end, in the tokens of each encoder."""
        ends = np.array([len(whole.ids) for whole in wholes])
        limits = [encoder.max_length for encoder in encoders]
        if (ends <= limits).all():
            return np.stack([np.zeros_like(ends), ends])
        student, *others = (whole.ids for whole in wholes)
        readers = zip(self.make.crossing, others, strict=True)
        bounds = [teacher.aligner.align(student, ids).bounds for teacher, ids in readers]
        places = common_places(len(student), [(own[:, 0], own[:, 2]) for own in bounds], ends)
        return window_edges(places, limits, [len(encoder.opening.ids) for encoder in encoders])


def _teacher_sample(whole: Encoding, student: Tokens, is_cut: bool, teacher: CrossTokenizer) -> TeacherSample:
    """Make a teacher's sample. whole: the text of the student's tokens. Their bytes say nothing of the teacher's, whose
    tokenizer may rewrite the text in another way.
    """
    alignment = teacher.aligner.align(student.ids, whole.ids)
    last = exact_length(alignment) if is_cut else len(whole.ids)
    tokens = whole.cut(min(last, teacher.encoder.max_length)).tokens()
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
