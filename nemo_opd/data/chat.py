"""Conversations to samples: each side in its own chat template, and only what the assistant says is learned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from nemo_opd.alignment import (
    ChatTokens,
    RenderedChat,
    TokenAligner,
    align_chat,
)
from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.chat_beginning import locate_beginning, locate_up_to
from nemo_opd.data.documents import Conversation, Document
from nemo_opd.data.encoders import ChatEncoder
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
    pass


@dataclass(frozen=True)
class CrossTokenizerChat:
    """A teacher that reads its own ids."""

    encoder: ChatEncoder
    aligner: TokenAligner
    equal_history: EqualHistory = "text"


@dataclass(frozen=True)
class ChatSampleMaker:
    """Conversation → Sample."""

    student: ChatEncoder
    teachers: tuple[SameTokenizer | CrossTokenizerChat, ...]

    @property
    def identity(self) -> str:
        return identity_of("chat", self.student, self.teachers)

    def __call__(self, conversation: Document) -> Sample:
        """Cut the conversation to each side's length; a teacher keeps nothing after the last chunk of a cut student.

        Raises AlignmentError where a template refuses it, DataError for a token that a model cannot read.
        """
        assert isinstance(conversation, Conversation)
        rendered, length = self.student.rendered(conversation), self.student.max_length
        located = locate_beginning(self.student, rendered, length)
        whole = self.student.read(rendered, located)
        kept = whole.cut(length)
        student = self.student.tokens(kept)
        reached = int(located.ends[length - 1]) if len(kept.ids) < len(whole.ids) else None
        return Sample(
            student,
            tuple(
                teacher.sample(student)
                if isinstance(teacher, SameTokenizer)
                else teacher_sample(conversation, kept, student, teacher, rendered, reached)
                for teacher in self.teachers
            ),
        )


def teacher_sample(
    conversation: Conversation,
    kept: ChatTokens,
    student: Tokens,
    teacher: CrossTokenizerChat,
    rendered: RenderedChat,
    reached: int | None,
) -> TeacherSample:
    """Make a teacher's sample. rendered: the student's text; reached: the place at which it is cut, None for no cut."""
    theirs = teacher.encoder.rendered(conversation)
    place = len(theirs.text) if reached is None else rendered.counterpart(reached, theirs)
    whole = teacher.encoder.read(theirs, locate_up_to(teacher.encoder, theirs, place))
    alignment = align_chat(teacher.aligner, kept, whole)
    last = len(whole.ids) if reached is None else exact_length(alignment)
    tokens = teacher.encoder.tokens(whole.cut(min(last, teacher.encoder.max_length)))
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
