"""Tokenizers as sample makers use them: for texts and for conversations in a chat template, whole or only as far as a
sample needs them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import (
    ChatRenderer,
    ChatTokens,
    LocatedTokens,
    Pieces,
    RenderedChat,
    TokenAligner,
    fingerprint,
    locate_tokens,
    pieces_of,
)
from nemo_opd.config.data import LearnedTurns
from nemo_opd.config.teacher import EqualHistory
from nemo_opd.data.row_types import Conversation
from nemo_opd.data.samples import Tokens, require_ids

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

_Encoder = TypeVar("_Encoder", "Encoder", "ChatEncoder")
_VERSION = 3
"""Increment when the same text is encoded differently."""
_CHARACTERS_A_TOKEN = 8
"""Estimate for the first attempt to tokenize only the beginning of a text."""
_AHEAD = 256
"""Characters that are tokenized after the last token of a sample, so that the cut of the text does not change it."""
_LONGEST_RUN = 16_384
"""Characters in which the end of a word is looked for."""
_END_OF_WORD = re.compile(r"\S(?=\s)")


@dataclass(frozen=True, slots=True)
class Encoding:
    """Tokens of a text."""

    ids: NDArray[np.int32]
    ends: NDArray[np.int64]
    """Cumulative bytes of text at the end of each token."""

    def cut(self, length: int) -> Encoding:
        return Encoding(self.ids[:length], self.ends[:length])

    def part(self, start: int, stop: int, opening: Encoding) -> Encoding:
        """Return tokens [start, stop), with `opening` in front unless they begin the text."""
        if start == 0:
            return self.cut(stop)
        ends = self.ends[start:stop] - self.ends[start - 1]
        return Encoding(np.concatenate((opening.ids, self.ids[start:stop])), np.concatenate((opening.ends, ends)))

    def tokens(self) -> Tokens:
        return Tokens(self.ids, np.arange(len(self.ids)) > 0, np.diff(self.ends, prepend=0).astype(np.int32))


@dataclass(frozen=True)
class Encoder:
    """A tokenizer that adds its default special tokens to a text, and the end-of-sequence token at the end.

    Neither is added a second time to a text that already spells it, as a rendered conversation does.
    """

    tokenizer: PreTrainedTokenizerBase
    pieces: Pieces
    lengths: NDArray[np.int32]
    """[V]: bytes of text per id that the model can read; 0 for special tokens (methods.md §1.1)."""
    max_length: int
    append_eos: bool
    reads_special: bool = True
    """Whether a special token spelled in a text is read as that token, not as its characters."""

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        append_eos: bool,
        vocab_size: int | None = None,
        *,
        reads_special: bool = True,
    ) -> Self:
        """Make an encoder. vocab_size: number of ids that the model can read, all by default.

        Raises AlignmentError for tokens without exact bytes.
        """
        pieces = pieces_of(tokenizer)
        if not reads_special:
            tokenizer = deepcopy(tokenizer)  # other threads tokenize conversations with the original
            tokenizer.split_special_tokens = True
        return cls(tokenizer, pieces, pieces.lengths[:vocab_size], max_length, append_eos, reads_special)

    @property
    def identity(self) -> tuple[object, ...]:
        eos = self.tokenizer.eos_token_id if self.append_eos else None
        return fingerprint(self.tokenizer), eos, self.max_length, len(self.lengths), self.reads_special, _VERSION

    def __call__(self, text: str, *, is_end: bool = True) -> Encoding:
        """Tokenize the full text. A tokenizer without an end-of-sequence token appends none.

        is_end: whether the document ends with the text; otherwise no special token follows it. Raises DataError for a
        text with a token that the model cannot read.
        """
        return self._encoding(self._encoded(text), text, is_end=is_end)

    @cached_property
    def opening(self) -> Encoding:
        """Special tokens that precede every text: usually the beginning-of-sequence token, or none."""
        encoding = self._encoding(self._encoded("a"), "a")
        return encoding.cut(min(int((encoding.ends == 0).sum()), self.max_length - 1))

    @cached_property
    def continues_character(self) -> NDArray[np.bool_]:
        """Ids whose first byte is inside a character in UTF-8: bool [V]."""
        return np.array([0x80 <= piece[0] < 0xC0 if piece else False for piece in self.pieces.as_list()])

    def located(self, text: str) -> tuple[Encoding, NDArray[np.int64]]:
        """Tokenize a text and locate the first character of each token: [S], non-decreasing."""
        encoded = self._encoded(text, return_offsets_mapping=True)
        encoding = self._encoding(encoded, text)
        starts, ends = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)[self._token_range(encoded, text)].T
        # Special tokens after a text have the offsets (0, 0), like those before it.
        starts = np.where((ends == 0) & (np.maximum.accumulate(ends) > 0), len(text), starts)
        appended = np.full(len(encoding.ids) - len(starts), len(text), np.int64)
        return encoding, np.maximum.accumulate(np.concatenate((starts, appended)))

    def _encoded(self, text: str, **options: bool) -> BatchEncoding:
        # The call overrides the tokenizer file's truncation and padding; verbose would warn about long texts.
        return self.tokenizer(text, return_attention_mask=False, verbose=False, **options)

    def _encoding(self, encoded: BatchEncoding, text: str, *, is_end: bool = True) -> Encoding:
        ids: list[int] = list(encoded["input_ids"])[self._token_range(encoded, text, is_end=is_end)]
        eos = self.tokenizer.eos_token_id
        if (
            is_end
            and self.append_eos
            and eos is not None
            and (not ids or ids[-1] != eos)
            and not self._spells_end(text)
        ):
            ids.append(eos)
        array = np.asarray(ids, dtype=np.int32)
        require_ids(array, len(self.lengths), self.tokenizer, text)
        return Encoding(array, np.cumsum(self.lengths[array], dtype=np.int64))

    @cached_property
    def _added_tokens(self) -> tuple[list[int], list[int]]:
        """Special tokens that the tokenizer itself puts before and after each text."""
        ids = list(self._encoded("a")["input_ids"])
        text = np.flatnonzero(self.pieces.lengths[ids])
        return (ids[: text[0]], ids[text[-1] + 1 :]) if len(text) else (ids, [])

    def _token_range(self, encoded: BatchEncoding, text: str, *, is_end: bool = True) -> slice:
        """Return the range of tokens to use: without added tokens that the text already spells, or that end it."""
        ids, (leading, trailing) = encoded["input_ids"], self._added_tokens
        count = len(leading)
        is_twice = self.reads_special and count > 0 and ids[count : 2 * count] == leading
        return slice(
            count if is_twice else 0, len(ids) - (len(trailing) if not is_end or self._spells_end(text) else 0)
        )

    def _spells_end(self, text: str) -> bool:
        """Return whether the text, apart from trailing white space, ends with the end-of-sequence token."""
        eos = self.tokenizer.eos_token
        return self.reads_special and bool(eos) and text.rstrip().endswith(str(eos))


@dataclass(frozen=True)
class ChatEncoder:
    """A tokenizer of conversations. The chat template writes all special tokens, including the end of sequence."""

    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    lengths: NDArray[np.int32]
    """[V]: bytes of text per id, 0 for special tokens (methods.md §1.1)."""
    max_length: int
    identity: tuple[object, ...]

    @classmethod
    def of(
        cls,
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        template_kwargs: Mapping[str, Any],
        vocab_size: int | None = None,
        turns: LearnedTurns = "all",
    ) -> Self:
        """Make an encoder. vocab_size: number of ids the model can read, all by default. turns: those that are learned.

        Raises AlignmentError if tokens lack exact bytes or the tokenizer has no chat template.
        """
        lengths = pieces_of(tokenizer).lengths[:vocab_size]
        renderer = ChatRenderer(tokenizer, template_kwargs=template_kwargs, turns=turns)
        identity = (fingerprint(tokenizer), renderer.identity, max_length, len(lengths))
        return cls(tokenizer, renderer, lengths, max_length, identity)

    def __call__(self, conversation: Conversation) -> ChatTokens:
        """Tokenize the full conversation.

        Raises AlignmentError if the template rejects it, DataError for a token that the model cannot read.
        """
        rendered = self.rendered(conversation)
        return self.read(rendered, locate_tokens(self.tokenizer, rendered.text))

    def rendered(self, conversation: Conversation) -> RenderedChat:
        """Render the conversation. Raises AlignmentError if the template rejects it."""
        return self.renderer.render(conversation.messages, conversation.tools)

    def read(self, rendered: RenderedChat, located: LocatedTokens) -> ChatTokens:
        """Assign roles to tokens. located: tokens of the rendered text, all or only the first.

        Raises DataError for a token that the model cannot read.
        """
        require_ids(located.ids, len(self.lengths), self.tokenizer, rendered.text)
        return self.renderer.tokens(rendered, located)

    def tokens(self, chat: ChatTokens) -> Tokens:
        mask = chat.assistant_mask.copy()
        mask[:1] = False
        return Tokens(chat.ids, mask, np.where(chat.is_content, self.lengths[chat.ids], np.int32(0)))


@dataclass(frozen=True)
class CrossTokenizer(Generic[_Encoder]):
    """A teacher with its own tokenizer."""

    encoder: _Encoder
    aligner: TokenAligner
    equal_history: EqualHistory = "text"

    @property
    def identity(self) -> tuple[object, ...]:
        return (*self.encoder.identity, self.aligner.fingerprint, self.equal_history)


def encode_beginning(student: Encoder, teachers: Sequence[Encoder], text: str, length: int) -> list[Encoding]:
    """Tokenize a text as far as a sample of `length` student tokens needs it; return the student's tokens, then each
    teacher's.

    The student has more than `length` tokens if the full text has more. A teacher reads the text up to a little after
    the first token that the student does not read. The text is cut at the end of a word, so the tokens of
    the sample are those of the full text, unless one unbroken run of characters is longer than `_LONGEST_RUN`.

    Raises DataError for a text with a token that a model cannot read.
    """
    part = text
    for beginning in _beginnings(text, length):
        encoding, starts = student.located(beginning)
        if length < len(starts) and starts[length] + _AHEAD <= len(beginning):
            part = _first_characters(text, int(starts[length]) + _AHEAD)
            break
    return [encoding, *(teacher(part) for teacher in teachers)]


def locate_beginning(side: ChatEncoder, rendered: RenderedChat, length: int) -> LocatedTokens:
    """Tokenize a conversation far enough to know its first `length` tokens and whether more follow."""
    for beginning in _beginnings(rendered.text, length):
        located = locate_tokens(side.tokenizer, beginning)
        if length < len(located.ids) and located.starts[length] + _AHEAD <= len(beginning):
            break
    return located


def locate_up_to(side: ChatEncoder, rendered: RenderedChat, place: int) -> LocatedTokens:
    """Tokenize the rendered conversation up to a little after character `place`."""
    return locate_tokens(side.tokenizer, _first_characters(rendered.text, place + _AHEAD))


def _beginnings(text: str, length: int) -> Iterator[str]:
    """Yield longer and longer beginnings of a text to tokenize until one has `length` tokens; the last is all of it."""
    size = _CHARACTERS_A_TOKEN * length + 2 * _AHEAD
    while size < len(text):
        yield _first_characters(text, size)
        size *= 2
    yield text


def _first_characters(text: str, size: int) -> str:
    """Return the first `size` characters of a text, and more up to the next end of a word."""
    limit = size + _LONGEST_RUN
    end = _END_OF_WORD.search(text, size, limit + 1)
    return text[: end.end() if end else limit]
