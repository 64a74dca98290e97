"""Conversations to samples, and the check of a dataset's conversations.

Each side uses its own chat template, and only assistant messages are learned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from nemo_opd.alignment import ChatTokens, LocatedTokens, RenderedChat, align_chat
from nemo_opd.alignment.chat_template import content_text, learned_messages, plain_messages
from nemo_opd.data.context import Content, PrivilegedPrompt, align_after, verbatim
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer, locate_beginning, locate_up_to
from nemo_opd.data.row_types import MESSAGES, TOOLS, Conversation, Document, Message, parsed, read_rows
from nemo_opd.data.samples import (
    SameTokenizer,
    Sample,
    TeacherSample,
    Tokens,
    exact_length,
    identity_of,
    usable_chunks,
)
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.types import Alignment

if TYPE_CHECKING:
    import datasets

    from nemo_opd.data.lines import Origin

_ROWS_AT_A_TIME = 1000


_ChatReader = SameTokenizer | CrossTokenizer[ChatEncoder]


@dataclass(frozen=True)
class ChatSampleMaker:
    """A maker of samples from conversations."""

    student: ChatEncoder
    teachers: tuple[_ChatReader | PrivilegedPrompt[_ChatReader], ...]

    @property
    def identity(self) -> str:
        return identity_of("chat", self.student, self.teachers)

    def __call__(self, conversation: Document) -> Sample:
        """Cut the conversation to each side's length. If the student is cut, a teacher keeps nothing after its last
        chunk.

        Raises AlignmentError if a template rejects the conversation, DataError for a token that a model cannot read.
        """
        assert isinstance(conversation, Conversation)
        rendered, length = self.student.rendered(conversation), self.student.max_length
        located = locate_beginning(self.student, rendered, length)
        full = self.student.read(rendered, located)
        chat = full.cut(length)
        student = self.student.tokens(chat)
        cut_at = int(located.ends[length - 1]) if len(chat.ids) < len(full.ids) else None
        read = _StudentChat(conversation, rendered, located, chat, student, cut_at)
        return Sample(student, tuple(_teacher_sample(read, teacher) for teacher in self.teachers))


@dataclass(frozen=True, slots=True)
class _StudentChat:
    """The student's view of a conversation."""

    conversation: Conversation
    rendered: RenderedChat
    located: LocatedTokens
    """Tokens of the rendered text, all or only the first."""
    chat: ChatTokens
    """Tokens that the student reads, with their roles."""
    tokens: Tokens
    cut_at: int | None
    """Character of the rendered text at which the student is cut; None if it reads all of it."""


def _teacher_sample(student: _StudentChat, teacher: _ChatReader | PrivilegedPrompt[_ChatReader]) -> TeacherSample:
    """Make a teacher's sample. Raises as `ChatSampleMaker` does."""
    if isinstance(teacher, PrivilegedPrompt):
        return _context_sample(student, teacher)
    if isinstance(teacher, SameTokenizer):
        return teacher.sample(student.tokens)
    theirs = teacher.encoder.rendered(student.conversation)
    full = teacher.encoder.read(theirs, _locate_as_far(student, teacher, student.rendered, theirs))
    return _aligned_sample(student, teacher, full, align_chat(teacher.aligner, student.chat, full))


def _locate_as_far(
    student: _StudentChat, teacher: CrossTokenizer[ChatEncoder], ours: RenderedChat, theirs: RenderedChat
) -> LocatedTokens:
    """Tokenize the teacher's text as far as the student reads its own.

    ours, theirs: renderings of the same messages by the student and the teacher.
    """
    place = len(theirs.text) if student.cut_at is None else ours.counterpart(student.cut_at, theirs)
    return locate_up_to(teacher.encoder, theirs, place)


def _aligned_sample(
    student: _StudentChat, teacher: CrossTokenizer[ChatEncoder], full: ChatTokens, alignment: Alignment
) -> TeacherSample:
    last = len(full.ids) if student.cut_at is None else exact_length(alignment)
    tokens = teacher.encoder.tokens(full.cut(min(last, teacher.encoder.max_length)))
    return TeacherSample(tokens, usable_chunks(alignment, student.tokens, tokens, teacher.equal_history))


def _context_sample(student: _StudentChat, teacher: PrivilegedPrompt[_ChatReader]) -> TeacherSample:
    """Make the sample of a teacher with a context; it is compared from the first turn after the context on."""
    conversation, reader = student.conversation, teacher.reader
    messages = plain_messages(conversation.messages)
    first = teacher.context.response_start(messages)
    if first is None or first not in student.rendered.turns:
        return teacher.unanswered(_teacher_sample(student, reader))
    response = "".join(content_text(message) for message in messages[first:] if message["role"] == "assistant")

    def sample_in(content: Content) -> TeacherSample:
        assert not isinstance(content, str)
        if isinstance(reader, SameTokenizer):
            return _same_tokenizer_sample(student, reader, teacher, content, first)
        return _cross_tokenizer_sample(student, reader, teacher, content, first)

    return teacher.sample(messages[:first], conversation.fields, response, sample_in)


def _same_tokenizer_sample(
    student: _StudentChat,
    reader: SameTokenizer,
    teacher: PrivilegedPrompt[_ChatReader],
    prompt: Sequence[Message],
    first: int,
) -> TeacherSample:
    """Make the sample of the student's tokens from message `first` on, after another prompt.

    A token across the edge belongs to the prompt: the teacher reads its text there.
    """
    edge, located = student.rendered.turns[first].start, student.located
    start = int(np.searchsorted(located.starts, edge, "left"))
    overhang = student.rendered.text[edge : located.starts[start]] if start < len(located.starts) else ""
    ids = teacher.prompt_ids(prompt, student.conversation.tools, overhang)
    return verbatim(reader, ids, student.tokens, start, teacher.max_length)


def _cross_tokenizer_sample(
    student: _StudentChat,
    reader: CrossTokenizer[ChatEncoder],
    teacher: PrivilegedPrompt[_ChatReader],
    prompt: Sequence[Message],
    first: int,
) -> TeacherSample:
    """Make the sample of the messages from `first` on, in the teacher's tokens and after another prompt."""
    conversation = student.conversation
    messages = [*prompt, *conversation.messages[first:]]
    theirs = reader.encoder.rendered(Conversation(messages, conversation.tools))
    if len(prompt) not in theirs.turns:
        raise DataError(f"{teacher.context.key}: the teacher's chat template leaves out the assistant's message")
    located = _locate_as_far(student, reader, student.rendered.after(first), theirs.after(len(prompt)))
    starts = student.located.at(student.rendered.turns[first].start), located.at(theirs.turns[len(prompt)].start)
    teacher.require_room(starts[1])
    full = reader.encoder.read(theirs, located)
    full = replace(full, assistant_mask=full.assistant_mask & (np.arange(len(full.ids)) >= starts[1]))
    alignment = align_after(reader.aligner, student.chat, full, starts, (first, len(prompt)))
    return _aligned_sample(student, reader, full, alignment)


def require_conversations(documents: datasets.Dataset, source: str, origin: Origin) -> None:
    """Check all rows, about 50,000 a second. Raises DataError with the place of the first malformed row."""
    for start in range(0, len(documents), _ROWS_AT_A_TIME):
        rows = read_rows(documents, list(range(start, min(start + _ROWS_AT_A_TIME, len(documents)))))
        tools = rows.get(TOOLS, [None] * len(rows[MESSAGES]))
        for i, row in enumerate(zip(rows[MESSAGES], tools, strict=True), start=start):
            if reason := _conversation_problem(*row):
                raise DataError(f"{source}: {origin(i)} is not a conversation: {reason}")


def _conversation_problem(messages: Any, tools: Any = None) -> str | None:
    """Return why the columns' values are not a conversation, or None if they are."""
    try:
        learned_messages(plain_messages(parsed(messages)))
        offered = parsed(tools)
    except (AlignmentError, DataError) as error:
        return str(error)
    if offered is None or (isinstance(offered, list) and all(isinstance(tool, Mapping) for tool in offered)):
        return None
    return f"its tools are not a list of objects but {repr(offered)[:60]}; correct the column that data.tools_key names"
