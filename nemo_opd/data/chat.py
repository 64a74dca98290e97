"""Conversations to samples: each side in its own chat template, and only the assistant's messages are learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from nemo_opd.alignment import ChatTokens, LocatedTokens, RenderedChat, TokenAligner, align_chat
from nemo_opd.alignment.chat_messages import content_text, plain_messages
from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.chat_beginning import locate_beginning, locate_up_to
from nemo_opd.data.context import Content
from nemo_opd.data.documents import Conversation, Document
from nemo_opd.data.encoders import ChatEncoder
from nemo_opd.data.in_context import InContext, align_after, verbatim
from nemo_opd.data.record import Message
from nemo_opd.data.samples import (
    SameTokenizer,
    Sample,
    TeacherSample,
    Tokens,
    exact_length,
    identity_of,
    usable_chunks,
)
from nemo_opd.errors import DataError
from nemo_opd.types import Alignment


@dataclass(frozen=True)
class CrossTokenizerChat:
    """A teacher that reads its own ids."""

    encoder: ChatEncoder
    aligner: TokenAligner
    equal_history: EqualHistory = "text"

    @property
    def identity(self) -> tuple[object, ...]:
        return (*self.encoder.identity, self.aligner.fingerprint, self.equal_history)


_ChatReader = SameTokenizer | CrossTokenizerChat


@dataclass(frozen=True)
class ChatSampleMaker:
    """Conversation → Sample."""

    student: ChatEncoder
    teachers: tuple[_ChatReader | InContext[_ChatReader], ...]

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
        read = StudentChat(conversation, rendered, located, kept, student, reached)
        return Sample(student, tuple(_teacher_sample(read, teacher) for teacher in self.teachers))


@dataclass(frozen=True, slots=True)
class StudentChat:
    """A conversation as the student reads it."""

    conversation: Conversation
    rendered: RenderedChat
    located: LocatedTokens
    """Tokens of the rendered text, all or the first."""
    kept: ChatTokens
    """Tokens that the student reads."""
    tokens: Tokens
    reached: int | None
    """The place of the text at which it is cut; None for no cut."""


def _teacher_sample(student: StudentChat, teacher: _ChatReader | InContext[_ChatReader]) -> TeacherSample:
    """Make a teacher's sample. Raises as `ChatSampleMaker` does."""
    if isinstance(teacher, InContext):
        return _in_context(student, teacher)
    if isinstance(teacher, SameTokenizer):
        return teacher.sample(student.tokens)
    theirs = teacher.encoder.rendered(student.conversation)
    whole = teacher.encoder.read(theirs, _as_far(student, teacher, student.rendered, theirs))
    return _aligned(student, teacher, whole, align_chat(teacher.aligner, student.kept, whole))


def _as_far(
    student: StudentChat, teacher: CrossTokenizerChat, ours: RenderedChat, theirs: RenderedChat
) -> LocatedTokens:
    """Tokenize the teacher's text as far as the student reads its own. ours, theirs: the messages that both have."""
    place = len(theirs.text) if student.reached is None else ours.counterpart(student.reached, theirs)
    return locate_up_to(teacher.encoder, theirs, place)


def _aligned(
    student: StudentChat, teacher: CrossTokenizerChat, whole: ChatTokens, alignment: Alignment
) -> TeacherSample:
    last = len(whole.ids) if student.reached is None else exact_length(alignment)
    tokens = teacher.encoder.tokens(whole.cut(min(last, teacher.encoder.max_length)))
    return TeacherSample(tokens, usable_chunks(alignment, student.tokens, tokens, teacher.equal_history))


def _in_context(student: StudentChat, teacher: InContext[_ChatReader]) -> TeacherSample:
    """Make the sample of a teacher with a context, compared from the first turn after it on."""
    conversation, reader = student.conversation, teacher.reader
    messages = plain_messages(conversation.messages)
    first = teacher.context.response_start(messages)
    if first is None or first not in student.rendered.turns:
        return teacher.unanswered(_teacher_sample(student, reader))
    said = "".join(content_text(message) for message in messages[first:] if message["role"] == "assistant")

    def sample_in(content: Content) -> TeacherSample:
        assert not isinstance(content, str)
        if isinstance(reader, SameTokenizer):
            return _verbatim(student, reader, teacher, content, first)
        return _after(student, reader, teacher, content, first)

    return teacher.sample(messages[:first], conversation.fields, said, sample_in)


def _verbatim(
    student: StudentChat,
    reader: SameTokenizer,
    teacher: InContext[_ChatReader],
    prompt: Sequence[Message],
    first: int,
) -> TeacherSample:
    """Make the sample of the student's tokens from message `first` on, after another prompt.

    A token across the edge is the prompt's: the teacher reads its text there.
    """
    written, located = student.rendered.turns[first].start, student.located
    start = int(np.searchsorted(located.starts, written, "left"))
    before = student.rendered.text[written : located.starts[start]] if start < len(located.starts) else ""
    ids = teacher.prompt_ids(prompt, student.conversation.tools, before)
    return verbatim(reader, ids, student.tokens, start, teacher.max_length)


def _after(
    student: StudentChat,
    reader: CrossTokenizerChat,
    teacher: InContext[_ChatReader],
    prompt: Sequence[Message],
    first: int,
) -> TeacherSample:
    """Make the sample of the messages from `first` on, after another prompt, in the teacher's own tokens."""
    conversation = student.conversation
    messages = [*prompt, *conversation.messages[first:]]
    theirs = reader.encoder.rendered(Conversation(messages, conversation.tools))
    if len(prompt) not in theirs.turns:
        raise DataError(f"{teacher.context.key}: the teacher's chat template leaves out the assistant's message")
    located = _as_far(student, reader, student.rendered.after(first), theirs.after(len(prompt)))
    starts = student.located.at(student.rendered.turns[first].start), located.at(theirs.turns[len(prompt)].start)
    teacher.require_room(starts[1])
    whole = reader.encoder.read(theirs, located)
    whole = replace(whole, assistant_mask=whole.assistant_mask & (np.arange(len(whole.ids)) >= starts[1]))
    alignment = align_after(reader.aligner, student.kept, whole, starts, (first, len(prompt)))
    return _aligned(student, reader, whole, alignment)
