"""Rollouts to samples: the ids that were sampled, and each teacher's own tokens of the same text (methods.md §10.1)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import ChatTokens, TokenAligner, align_chat, pieces_of
from nemo_opd.alignment.chat_messages import plain_messages, said_by
from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.chat import CrossTokenizerChat
from nemo_opd.data.continuation import TextContinuation, text_of
from nemo_opd.data.documents import Conversation
from nemo_opd.data.record import Rollout
from nemo_opd.data.samples import SameTokenizer, Sample, TeacherSample, Tokens, require_ids, usable_chunks
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CrossTokenizerText:
    """A teacher that reads its own ids of a text."""

    tokenizer: PreTrainedTokenizerBase
    continuation: TextContinuation
    lengths: NDArray[np.int32]
    """[W]: bytes of text per id the model can read, 0 for special tokens."""
    max_length: int
    aligner: TokenAligner
    equal_history: EqualHistory = "text"

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        aligner: TokenAligner,
        vocab_size: int | None = None,
        equal_history: EqualHistory = "text",
    ) -> CrossTokenizerText:
        """Prepare for a tokenizer. vocab_size: ids that the model can read, by default all. Raises AlignmentError for
        tokens without exact bytes.
        """
        lengths = pieces_of(tokenizer).lengths[:vocab_size]
        return cls(tokenizer, TextContinuation(tokenizer), lengths, max_length, aligner, equal_history)


CrossTokenizerReader = CrossTokenizerText | CrossTokenizerChat


@dataclass(frozen=True)
class RolloutSampleMaker:
    """Rollout → Sample. Only what the student sampled, or the dataset has as its continuation, is learned."""

    lengths: NDArray[np.int32]
    """[V]: bytes of text per id of the student, 0 for special tokens."""
    teachers: tuple[SameTokenizer | CrossTokenizerReader, ...]

    def __call__(self, rollout: Rollout) -> Sample:
        """Raises AlignmentError, naming the prompt's row, where a teacher's template refuses the conversation, and
        DataError for a token that a teacher cannot read.
        """
        mask = rollout.loss_mask.copy()
        mask[:1] = False
        student = Tokens(rollout.ids, mask, self.lengths[rollout.ids])
        return Sample(student, tuple(teacher_sample(rollout, student, teacher) for teacher in self.teachers))


def teacher_sample(rollout: Rollout, student: Tokens, teacher: SameTokenizer | CrossTokenizerReader) -> TeacherSample:
    if isinstance(teacher, SameTokenizer):
        return teacher.sample(student)
    if isinstance(teacher, CrossTokenizerText):
        return _text_sample(rollout, student, teacher)
    return _chat_sample(rollout, student, teacher)


def _text_sample(rollout: Rollout, student: Tokens, teacher: CrossTokenizerText) -> TeacherSample:
    """Make a sample of a text, with the teacher's end of sequence where the student ended it."""
    text, response = text_of(rollout.prompt), rollout.responses[-1]
    whole = teacher.continuation(text, response, is_ended=rollout.finish_reason == "stop")
    require_ids(whole.ids, len(teacher.lengths), teacher.tokenizer, text + response)
    ids = whole.ids[: teacher.max_length]
    positions = np.arange(len(ids))
    tokens = Tokens(ids, (positions >= whole.start) & (positions > 0), teacher.lengths[ids])
    alignment = teacher.aligner.align(student.ids, ids)
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))


def _chat_sample(rollout: Rollout, student: Tokens, teacher: CrossTokenizerChat) -> TeacherSample:
    """Make a sample of a conversation in the teacher's template, compared with the student's turn by turn."""
    conversation = Conversation(list(rollout.messages), list(rollout.prompt.tools or ()) or None)
    try:
        whole = _own_turns(teacher.encoder(conversation), rollout)
    except AlignmentError as error:
        raise AlignmentError(f"prompt {rollout.prompt.index} (row), sample {rollout.sample}: {error}") from error
    alignment = align_chat(teacher.aligner, _sampled_tokens(rollout), whole)
    tokens = teacher.encoder.tokens(whole.cut(teacher.encoder.max_length))
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))


def _sampled_tokens(rollout: Rollout) -> ChatTokens:
    """Return the sampled ids with the student's turns as contents, without the tokens that ended them.

    The contents of others are left empty where they stand: nothing of them is learned, so nothing has to be aligned.
    They are somewhere between two turns.
    """
    is_turn = np.zeros(len(rollout.messages), np.bool_)
    is_turn[rollout.turn_messages] = True
    ended = np.ones(len(rollout.turns), np.int32)
    ended[-1] = rollout.finish_reason == "stop"
    # A message stands where the turn before it stopped.
    stops = np.concatenate([[0], rollout.turns[:, 1]])
    spans = np.repeat(stops[np.cumsum(is_turn)], 2).reshape(-1, 2).astype(np.int32)
    spans[is_turn] = rollout.turns - ended[:, None] * [[0, 1]]
    starts = np.append(rollout.turns[:, 0], len(rollout.ids))
    places = np.where(is_turn[:, None], spans, np.stack([stops, starts], 1)[np.cumsum(is_turn)]).astype(np.int32)
    said = tuple(map(said_by, plain_messages(rollout.messages)))
    return ChatTokens(rollout.ids, rollout.loss_mask, spans, said, places)


def _own_turns(chat: ChatTokens, rollout: Rollout) -> ChatTokens:
    """Cut the teacher's tokens after the last sampled turn, and score the sampled turns alone.

    A turn that was cut by length has no end, whatever the template writes there.
    """
    starts = np.concatenate([[0], chat.spans[:, 1]])
    stops = np.concatenate([chat.spans[:, 0], [len(chat.ids)]])
    mask = np.zeros(len(chat.ids), np.bool_)
    for k in rollout.turn_messages:
        around = slice(starts[k], stops[k + 1])
        mask[around] = chat.assistant_mask[around]
    if rollout.finish_reason == "length":
        mask[chat.spans[rollout.turn_messages[-1], 1] :] = False
    length = int(np.flatnonzero(mask).max(initial=-1)) + 1
    return replace(chat, assistant_mask=mask).cut(length)
