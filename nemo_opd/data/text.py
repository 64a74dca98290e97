"""Texts to samples: documents, whole or as windows, and prompts with their continuations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.chat import locate_tokens
from nemo_opd.data.encoders import CrossTokenizer, Encoder, Encoding, encode_beginning
from nemo_opd.data.row_types import Document, Prompt
from nemo_opd.data.samples import (
    SameTokenizer,
    Sample,
    TeacherSample,
    Tokens,
    exact_length,
    identity_of,
    usable_chunks,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = NDArray[np.int32]


@dataclass(frozen=True)
class TextSampleMaker:
    """A maker of samples from texts."""

    student: Encoder
    teachers: tuple[SameTokenizer | CrossTokenizer[Encoder], ...]

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
    def crossing(self) -> list[CrossTokenizer[Encoder]]:
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


def _teacher_sample(
    encoding: Encoding, student: Tokens, is_cut: bool, teacher: CrossTokenizer[Encoder]
) -> TeacherSample:
    """Make a teacher's sample. encoding: the text of the student's tokens.

    The student's byte counts do not apply: the teacher's tokenizer may rewrite the text differently.
    """
    alignment = teacher.aligner.align(student.ids, encoding.ids)
    last = exact_length(alignment) if is_cut else len(encoding.ids)
    tokens = encoding.cut(min(last, teacher.encoder.max_length)).tokens()
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))


@dataclass(frozen=True)
class TextWindowMaker:
    """A maker of windows that cover all of a text, each a text of its own for every model (methods.md §8.6)."""

    make: TextSampleMaker

    @property
    def identity(self) -> str:
        return f"windows of {self.make.identity}"

    def __call__(self, text: Document) -> tuple[Sample, ...]:
        """Cut the text into windows that fit the student, whatever the teachers.

        A teacher reads the text of a window in its own tokens, as far as its length. Raises AlignmentError from the
        aligners, DataError for a text with a token that a model cannot read.
        """
        assert isinstance(text, str)
        student = self.make.student
        encoding, starts = student.located(text)
        # A token may begin later than the one before and yet inside a character, of which that one has the first bytes.
        begins_character = (np.diff(starts, prepend=starts[:1]) > 0) & ~student.continues_character[encoding.ids]
        edges = window_edges(begins_character, student.max_length, len(student.opening.ids))
        places = np.append(starts, len(text))
        places[0] = 0
        windows = []
        for begin, end in pairwise(edges):
            part, is_end = text[places[begin] : places[end]], end == len(starts)
            readings = [teacher.encoder(part, is_end=is_end) for teacher in self.make.crossing]
            tokens = encoding.part(begin, end, student.opening).tokens()
            windows.append(self.make.sample(tokens, readings, is_cut=False))
        return tuple(windows)


def window_edges(begins_character: NDArray[np.bool_], limit: int, opening: int) -> list[int]:
    """Cut a document into windows of at most `limit` tokens, as long as possible: edges as numbers of tokens.

    Windows end before a token that begins a character, [S]. If none does within a window, it ends inside a character.
    opening: number of tokens in front of each window but the first.
    """
    length, places = len(begins_character), np.flatnonzero(begins_character)
    edges = [0]
    while length - edges[-1] > (room := limit - opening * (len(edges) > 1)):
        last = edges[-1] + room
        number = int(np.searchsorted(places, last, "right"))
        reached = int(places[number - 1]) if number else 0
        edges.append(reached if reached > edges[-1] else last)
    return [*edges, length]


@dataclass(frozen=True, slots=True)
class Continued:
    """A prompt and its continuation as tokens."""

    ids: Ids
    """[S]"""
    start: int
    """Position of the continuation's first token."""
    is_ended: bool
    """Whether the last token ends the turn."""
    before: str = ""
    """Beginning of the continuation that shares the prompt's last token, before `start`."""


class TextContinuation:
    """A tokenizer of a prompt and its continuation as one text. Picklable."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        bare = tokenizer("a", add_special_tokens=False)["input_ids"]
        tokens = tokenizer("a")["input_ids"]
        count = next(i for i in range(len(tokens) + 1) if tokens[i : i + len(bare)] == bare)
        self._lead = np.array(tokens[:count], np.int32)
        """Tokens that the tokenizer puts before a text by default."""

    def __call__(self, prompt: str, response: str, *, is_ended: bool) -> Continued:
        """Return all tokens and, if `is_ended`, the tokenizer's end-of-sequence token, if it has one.

        Special tokens that the text itself spells at its beginning or end are not added a second time.

        The continuation starts with the first token that holds no character of the prompt.
        """
        text = prompt + response
        tokens = locate_tokens(self._tokenizer, text)
        start = int(np.searchsorted(tokens.starts, len(prompt), "left"))
        stop = int(tokens.starts[start]) if start < len(tokens.starts) else len(text)
        eos = self._tokenizer.eos_token_id if is_ended else None
        spells_end = len(tokens.ids) > 0 and tokens.ids[-1] == eos
        end = np.array([] if eos is None or spells_end else [eos], np.int32)
        spells_lead = np.array_equal(tokens.ids[: len(self._lead)], self._lead)
        lead = self._lead[:0] if spells_lead else self._lead
        ids = np.concatenate([lead, tokens.ids, end])
        return Continued(ids, len(lead) + start, eos is not None, text[len(prompt) : stop])


def text_of(prompt: Prompt) -> str:
    assert isinstance(prompt.content, str), "a text renderer is for prompts that are texts"
    return prompt.content
