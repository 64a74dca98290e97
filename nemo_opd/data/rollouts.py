"""Rollouts to samples: the sampled ids, and each teacher's own tokens of the same text (methods.md §10.1). Also the
prompts of a dataset.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import ChatTokens, TokenAligner, align_chat, pieces_of
from nemo_opd.alignment.chat_template import message_texts, plain_messages
from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.columns import Layout
from nemo_opd.data.context import Content, PrivilegedPrompt, align_after, prompt_text, shifted, verbatim
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer
from nemo_opd.data.row_types import (
    MESSAGES,
    OTHER,
    PROMPT,
    ROW,
    TEXT,
    TOOLS,
    Columns,
    Conversation,
    Message,
    Prompt,
    Rollout,
    answer_text,
    fields_of,
    parsed,
    read_rows,
)
from nemo_opd.data.samples import SameTokenizer, Sample, TeacherSample, Tokens, require_ids, usable_chunks
from nemo_opd.data.text import Continued, TextContinuation, text_of
from nemo_opd.errors import AlignmentError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class CrossTokenizerText:
    """A teacher with its own tokenizer that reads texts."""

    tokenizer: PreTrainedTokenizerBase
    continuation: TextContinuation
    lengths: NDArray[np.int32]
    """[W]: bytes of text per id that the model can read; 0 for special tokens."""
    max_length: int
    aligner: TokenAligner
    equal_history: EqualHistory = "text"

    @property
    def identity(self) -> tuple[object, ...]:
        return self.aligner.fingerprint, self.max_length, len(self.lengths), self.equal_history

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        aligner: TokenAligner,
        vocab_size: int | None = None,
        equal_history: EqualHistory = "text",
    ) -> CrossTokenizerText:
        """Make a reader. vocab_size: number of ids that the model can read, all by default.

        Raises AlignmentError for tokens without exact bytes.
        """
        lengths = pieces_of(tokenizer).lengths[:vocab_size]
        return cls(tokenizer, TextContinuation(tokenizer), lengths, max_length, aligner, equal_history)


CrossTokenizerReader = CrossTokenizerText | CrossTokenizer[ChatEncoder]
_RolloutReader = SameTokenizer | CrossTokenizerReader


@dataclass(frozen=True)
class RolloutSampleMaker:
    """A maker of samples from rollouts. Only tokens the student sampled, or the dataset's continuation, are learned."""

    lengths: NDArray[np.int32]
    """[V]: bytes of text per id of the student; 0 for special tokens."""
    teachers: tuple[_RolloutReader | PrivilegedPrompt[_RolloutReader], ...]

    def __call__(self, rollout: Rollout) -> Sample:
        """Make the sample.

        Raises AlignmentError, naming the prompt's row, if a teacher's template rejects the conversation, and DataError
        for a token that a teacher cannot read or a context that leaves no room for the response.
        """
        mask = rollout.loss_mask.copy()
        mask[:1] = False
        student = Tokens(rollout.ids, mask, self.lengths[rollout.ids])
        return Sample(student, tuple(_teacher_sample(rollout, student, teacher) for teacher in self.teachers))


def _teacher_sample(
    rollout: Rollout, student: Tokens, teacher: _RolloutReader | PrivilegedPrompt[_RolloutReader]
) -> TeacherSample:
    if isinstance(teacher, SameTokenizer):
        return teacher.sample(student)
    if isinstance(teacher, CrossTokenizerText):
        tokens, _ = _continue_text(rollout, teacher, text_of(rollout.prompt))
        alignment = teacher.aligner.align(student.ids, tokens.ids)
        return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))
    try:
        if isinstance(teacher, PrivilegedPrompt):
            return _context_sample(rollout, student, teacher)
        return _chat_sample(rollout, student, teacher)
    except (AlignmentError, DataError) as error:
        raise type(error)(f"prompt {rollout.prompt.index} (row), sample {rollout.sample}: {error}") from error


def _context_sample(rollout: Rollout, student: Tokens, teacher: PrivilegedPrompt[_RolloutReader]) -> TeacherSample:
    """Make the sample of a teacher with a context: the response after its own prompt."""
    reader, prompt, start = teacher.reader, rollout.prompt, int(rollout.turns[0, 0])

    def sample_in(content: Content) -> TeacherSample:
        if isinstance(reader, SameTokenizer):
            ids = teacher.prompt_ids(content, prompt.tools, rollout.before)
            return verbatim(reader, ids, student, start, teacher.max_length)
        if isinstance(reader, CrossTokenizerText):
            return _text_context_sample(rollout, student, reader, teacher, prompt_text(content))
        assert not isinstance(content, str)
        return _chat_context_sample(rollout, student, reader, teacher, content)

    return teacher.sample(prompt.content, prompt.fields, "".join(rollout.responses), sample_in)


def _continue_text(rollout: Rollout, teacher: CrossTokenizerText, text: str) -> tuple[Tokens, Continued]:
    """Continue a text with the response, plus the teacher's end-of-sequence token if the student ended its turn."""
    response = rollout.before + rollout.responses[-1]
    continued = teacher.continuation(text, response, is_ended=rollout.finish_reason == "stop")
    require_ids(continued.ids, len(teacher.lengths), teacher.tokenizer, text + response)
    ids = continued.ids[: teacher.max_length]
    positions = np.arange(len(ids))
    return Tokens(ids, (positions >= continued.start) & (positions > 0), teacher.lengths[ids]), continued


def _text_context_sample(
    rollout: Rollout, student: Tokens, reader: CrossTokenizerText, teacher: PrivilegedPrompt[_RolloutReader], text: str
) -> TeacherSample:
    """Make the sample of a response after another prompt, from the first token boundary that both sides share."""
    start = int(rollout.turns[0, 0])
    tokens, continued = _continue_text(rollout, reader, text)
    teacher.require_room(continued.start)
    ours = _byte_starts(student.num_bytes[start:], rollout.before)
    theirs = _byte_starts(tokens.num_bytes[continued.start :], continued.before)
    _, i, k = np.intersect1d(ours, theirs, return_indices=True)
    student_start, teacher_start = (
        start + int(i.min(initial=len(ours))),
        continued.start + int(k.min(initial=len(theirs))),
    )
    alignment = shifted(
        reader.aligner.align(student.ids[student_start:], tokens.ids[teacher_start:]), student_start, teacher_start
    )
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, reader.equal_history))


def _byte_starts(num_bytes: NDArray[np.int32], overhang: str) -> NDArray[np.int64]:
    """Return each token's first byte in the response. overhang: response text before the first token."""
    return len(overhang.encode()) + np.cumsum(num_bytes, dtype=np.int64) - num_bytes


def _chat_sample(rollout: Rollout, student: Tokens, teacher: CrossTokenizer[ChatEncoder]) -> TeacherSample:
    """Make the sample of a conversation in the teacher's template, compared with the student's turn by turn."""
    chat = _score_sampled_turns(_teacher_tokens(rollout, teacher, rollout.messages), rollout, rollout.turn_messages)
    alignment = align_chat(teacher.aligner, _sampled_tokens(rollout), chat)
    tokens = teacher.encoder.tokens(chat.cut(teacher.encoder.max_length))
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, teacher.equal_history))


def _chat_context_sample(
    rollout: Rollout,
    student: Tokens,
    reader: CrossTokenizer[ChatEncoder],
    teacher: PrivilegedPrompt[_RolloutReader],
    prompt: Sequence[Message],
) -> TeacherSample:
    """Make the sample of the student's turns after another prompt in the teacher's template."""
    first = len(rollout.prompt.content)
    turns = [len(prompt) + k - first for k in rollout.turn_messages]
    chat = _score_sampled_turns(_teacher_tokens(rollout, reader, [*prompt, *rollout.messages[first:]]), rollout, turns)
    starts = int(rollout.turns[0, 0]), int(np.flatnonzero(chat.assistant_mask).min(initial=len(chat.ids)))
    teacher.require_room(starts[1])
    alignment = align_after(reader.aligner, _sampled_tokens(rollout), chat, starts, (first, len(prompt)))
    tokens = reader.encoder.tokens(chat.cut(reader.encoder.max_length))
    return TeacherSample(tokens, usable_chunks(alignment, student, tokens, reader.equal_history))


def _teacher_tokens(rollout: Rollout, teacher: CrossTokenizer[ChatEncoder], messages: Sequence[Message]) -> ChatTokens:
    return teacher.encoder(Conversation(list(messages), list(rollout.prompt.tools or ()) or None))


def _sampled_tokens(rollout: Rollout) -> ChatTokens:
    """Return the sampled ids with the student's turns as contents, without the tokens that ended them.

    Contents of other messages have no tokens, since they are neither learned nor aligned. They lie between two turns.
    """
    is_turn = np.zeros(len(rollout.messages), np.bool_)
    is_turn[rollout.turn_messages] = True
    ended = np.ones(len(rollout.turns), np.int32)
    ended[-1] = rollout.finish_reason == "stop"
    # Place other messages at the end of the turn before them.
    stops = np.concatenate([[0], rollout.turns[:, 1]])
    spans = np.repeat(stops[np.cumsum(is_turn)], 2).reshape(-1, 2).astype(np.int32)
    spans[is_turn] = rollout.turns - ended[:, None] * [[0, 1]]
    starts = np.append(rollout.turns[:, 0], len(rollout.ids))
    places = np.where(is_turn[:, None], spans, np.stack([stops, starts], 1)[np.cumsum(is_turn)]).astype(np.int32)
    contents = tuple(map(message_texts, plain_messages(rollout.messages)))
    return ChatTokens(rollout.ids, rollout.loss_mask, spans, contents, places)


def _score_sampled_turns(chat: ChatTokens, rollout: Rollout, turn_messages: Sequence[int]) -> ChatTokens:
    """Score only the sampled turns, given by their messages, and cut the teacher's tokens after the last one.

    A turn that was cut by length has no end, whatever the template writes there.
    """
    starts = np.concatenate([[0], chat.spans[:, 1]])
    stops = np.concatenate([chat.spans[:, 0], [len(chat.ids)]])
    mask = np.zeros(len(chat.ids), np.bool_)
    for k in turn_messages:
        around = slice(starts[k], stops[k + 1])
        mask[around] = chat.assistant_mask[around]
    if rollout.finish_reason == "length":
        mask[chat.spans[turn_messages[-1], 1] :] = False
    length = int(np.flatnonzero(mask).max(initial=-1)) + 1
    return replace(chat, assistant_mask=mask).cut(length)


def read_prompts(columns: Columns, indices: Sequence[int], layout: Layout | None = None) -> list[Prompt]:
    """Read the prompts of these rows, in order. layout: of the columns; by default they have only our names.

    Messages are plain. Assistant messages at the end are the response, not part of the prompt. Raises DataError, naming
    the row, for a conversation that is malformed or without a user message.
    """
    if not indices:
        return []
    rows = read_rows(columns, list(indices))
    nothing = [None] * len(indices)
    answers, responses = (rows.get(layout.ours(use) if layout else use, nothing) for use in ("answer", "response"))
    contents = rows[TEXT] if TEXT in rows else rows[MESSAGES]
    tools = rows.get(TOOLS, nothing)
    prompts = [
        Prompt(index, content, answer=answer_text(answer), response=response)
        if TEXT in rows
        else _chat_prompt(index, content, offered, answer)
        for index, content, offered, answer, response in zip(indices, contents, tools, answers, responses, strict=True)
    ]
    fields = fields_of(rows, len(indices))
    if f"{PROMPT}0" in rows:
        del rows[MESSAGES]  # not a column of the user's
    user_names = {} if layout is None else {ours: name for name, ours in layout.columns.items()}
    rows |= {name: list(map(parsed, rows[name])) for name in (MESSAGES, TOOLS) if name in rows}
    row_columns = {
        user_names.get(name, name.removeprefix(ROW)): rows[name] for name in rows if not name.startswith(OTHER)
    }
    return [
        replace(prompt, fields=fields[i], row={name: values[i] for name, values in row_columns.items()})
        for i, prompt in enumerate(prompts)
    ]


def _chat_prompt(index: int, messages: Any, tools: Any, answer: object) -> Prompt:
    try:
        plain = plain_messages(parsed(messages))
        tools = parsed(tools) or None
    except (AlignmentError, DataError) as error:
        raise DataError(f"row {index} (counted from 0 over all files): {error}") from error
    if not any(message["role"] == "user" for message in plain):
        raise DataError(
            f"row {index} (counted from 0 over all files) has no user message for the student to answer (roles: "
            f"{', '.join(str(message['role']) for message in plain)}); leave it out of the data"
        )
    question, response = _without_last_turn(plain)
    return Prompt(index, question, tools=tools, answer=answer_text(answer), response=response)


def _without_last_turn(messages: Sequence[Message]) -> tuple[list[Message], str | None]:
    """Split off the assistant messages at the end; return the messages before them, and their text."""
    stop = len(messages)
    while stop and messages[stop - 1]["role"] == "assistant":
        stop -= 1
    text = "\n".join(message["content"] for message in messages[stop:] if message["content"])
    return list(messages[:stop]), text or None
