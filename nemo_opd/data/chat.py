"""Conversations to samples: each side in its own chat template, and only what the assistant says is learned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import ChatRenderer, ChatTokens, TokenAligner, align_chat, fingerprint, pieces_of
from nemo_opd.config.teacher import EqualHistory
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
        lengths = pieces_of(tokenizer).lengths[:vocab_size]
        settings = (tokenizer.chat_template, sorted(template_kwargs.items()), tokenizer.special_tokens_map)
        identity = (fingerprint(tokenizer), settings, max_length, len(lengths))
        return cls(tokenizer, ChatRenderer(tokenizer, template_kwargs=template_kwargs), lengths, max_length, identity)

    def __call__(self, conversation: Conversation) -> ChatTokens:
        """The conversation's tokens, uncut.

        Raises AlignmentError where the template refuses it, DataError for a token that the model cannot read.
        """
        rendered = self.renderer(conversation.messages, conversation.tools)
        require_ids(rendered.ids, len(self.lengths), self.tokenizer, str(conversation.messages))
        return rendered

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
        whole = self.student(conversation)
        kept = whole.cut(self.student.max_length)
        is_cut = len(kept.ids) < len(whole.ids)
        student = self.student.tokens(kept)
        return Sample(
            student,
            tuple(teacher_sample(conversation, kept, student, is_cut, teacher) for teacher in self.teachers),
        )


def teacher_sample(
    conversation: Conversation,
    kept: ChatTokens,
    student: Tokens,
    is_cut: bool,
    teacher: SameTokenizer | CrossTokenizerChat,
) -> TeacherSample:
    if isinstance(teacher, SameTokenizer):
        return teacher.sample(student)
    whole = teacher.encoder(conversation)
    alignment = align_chat(teacher.aligner, kept, whole)
    last = exact_length(alignment) if is_cut else len(whole.ids)
    tokens = teacher.encoder.tokens(whole.cut(min(last, teacher.encoder.max_length)))
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
