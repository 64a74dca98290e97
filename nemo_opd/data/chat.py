"""Conversations to samples: each side in its own chat template, and only what the assistant says is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import (
    ChatRenderer,
    ChatTokens,
    LocatedTokens,
    Pieces,
    RenderedChat,
    TokenAligner,
    align_chat,
    fingerprint,
    locate_tokens,
    pieces_of,
)
from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.chat_beginning import locate_beginning, locate_up_to
from nemo_opd.data.documents import Conversation, Document
from nemo_opd.data.samples import (
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
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class ChatEncoder:
    """A tokenizer's view of a conversation. The template writes all special tokens, end of sequence included."""

    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    pieces: Pieces
    lengths: NDArray[np.int32]
    """[V]: bytes of text per id, 0 for special tokens (METHODS §1)."""
    max_length: int
    identity: tuple[object, ...]

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        template_kwargs: Mapping[str, Any],
        vocab_size: int | None = None,
    ) -> Self:
        """`vocab_size`: ids the model can read, all by default.

        Raises AlignmentError where tokens lack exact bytes or there is no chat template.
        """
        pieces = pieces_of(tokenizer)
        lengths = pieces.lengths[:vocab_size]
        settings = (tokenizer.chat_template, sorted(template_kwargs.items()), tokenizer.special_tokens_map)
        identity = (fingerprint(tokenizer), settings, max_length, len(lengths))
        renderer = ChatRenderer(tokenizer, template_kwargs=template_kwargs)
        return cls(tokenizer, renderer, pieces, lengths, max_length, identity)

    def __call__(self, conversation: Conversation) -> ChatTokens:
        """The conversation's tokens, uncut.

        Raises AlignmentError where the template refuses it, DataError for a token that the model cannot read.
        """
        rendered = self.rendered(conversation)
        return self.read(rendered, locate_tokens(self.tokenizer, rendered.text))

    def rendered(self, conversation: Conversation) -> RenderedChat:
        """Raises AlignmentError where the template refuses it."""
        return self.renderer.render(conversation.messages, conversation.tools)

    def read(self, rendered: RenderedChat, located: LocatedTokens) -> ChatTokens:
        """located: tokens of the rendered text, all or the first.

        Raises DataError for one that the model cannot read.
        """
        require_ids(located.ids, len(self.lengths), self.tokenizer, rendered.text)
        return self.renderer.tokens(rendered, located)

    def tokens(self, chat: ChatTokens) -> Tokens:
        mask = chat.assistant_mask.copy()
        mask[:1] = False
        return Tokens(chat.ids, mask, np.where(chat.is_content, self.lengths[chat.ids], np.int32(0)))


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
        """The conversation cut to each side's length; a teacher keeps nothing behind the last chunk of a cut student.

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
    """rendered: what the student reads; reached: the place in it at which it is cut, None where it is not."""
    theirs = teacher.encoder.rendered(conversation)
    place = len(theirs.text) if reached is None else rendered.counterpart(reached, theirs)
    whole = teacher.encoder.read(theirs, locate_up_to(teacher.encoder, theirs, place))
    alignment = align_chat(teacher.aligner, kept, whole)
    last = len(whole.ids) if reached is None else exact_length(alignment)
    tokens = teacher.encoder.tokens(whole.cut(min(last, teacher.encoder.max_length)))
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
