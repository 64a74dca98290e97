"""Tokenizers as sample makers use them: for texts and for conversations in a chat template, whole or only as far as a
sample needs them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import (
    ChatRenderer,
    ChatTokens,
    LocatedTokens,
    Pieces,
    RenderedChat,
    fingerprint,
    locate_tokens,
    pieces_of,
)
from nemo_opd.config.data import LearnedTurns
from nemo_opd.data.record import Conversation
from nemo_opd.data.samples import Tokens, require_ids

if TYPE_CHECKING:
    from transformers import BatchEncoding, PreTrainedTokenizerBase

_VERSION = 2
"""Increment when the same text is encoded differently."""
MARGIN = 1024
"""Characters kept after a seam: pre-tokenizers may look this far beyond a run of one kind, and normalisers change text.
"""
_CHARACTERS_A_TOKEN = 8
"""Estimate for the first attempt to tokenize only the beginning of a text."""
EDGE = 64
"""Characters by which tokenizers may misplace a token that trims spaces, composes marks, or follows characters deleted
by a SentencePiece normaliser at the beginning of a text.

A teacher is aligned this far beyond the student's cut and no further. If the bytes of the two differ there, later text
would decide how earlier text is aligned.
"""
_MAX_SEAMS_TRIED = 256
"""Places that are tried in a range of tokens."""


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

    def __call__(self, text: str) -> Encoding:
        """Tokenize the full text. A tokenizer without an end-of-sequence token appends none.

        Raises DataError for a text with a token that the model cannot read.
        """
        return self._encoding(self._encoded(text), text)

    @cached_property
    def opening(self) -> Encoding:
        """Special tokens that precede every text: usually the beginning-of-sequence token, or none."""
        encoding = self._encoding(self._encoded("a"), "a")
        return encoding.cut(min(int((encoding.ends == 0).sum()), self.max_length - 1))

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

    def _encoding(self, encoded: BatchEncoding, text: str) -> Encoding:
        ids: list[int] = list(encoded["input_ids"])[self._token_range(encoded, text)]
        eos = self.tokenizer.eos_token_id
        if self.append_eos and eos is not None and (not ids or ids[-1] != eos) and not self._spells_end(text):
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

    def _token_range(self, encoded: BatchEncoding, text: str) -> slice:
        """Return the range of tokens to use: without added tokens that the text already spells."""
        ids, (leading, trailing) = encoded["input_ids"], self._added_tokens
        count = len(leading)
        is_twice = self.reads_special and count > 0 and ids[count : 2 * count] == leading
        return slice(count if is_twice else 0, len(ids) - (len(trailing) if self._spells_end(text) else 0))

    def _spells_end(self, text: str) -> bool:
        """Return whether the text, apart from trailing white space, ends with the end-of-sequence token."""
        eos = self.tokenizer.eos_token
        return self.reads_special and bool(eos) and text.rstrip().endswith(str(eos))


@dataclass(frozen=True)
class ChatEncoder:
    """A tokenizer of conversations. The chat template writes all special tokens, including the end of sequence."""

    tokenizer: PreTrainedTokenizerBase
    renderer: ChatRenderer
    pieces: Pieces
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
        pieces = pieces_of(tokenizer)
        lengths = pieces.lengths[:vocab_size]
        renderer = ChatRenderer(tokenizer, template_kwargs=template_kwargs, turns=turns)
        identity = (fingerprint(tokenizer), renderer.identity, max_length, len(lengths))
        return cls(tokenizer, renderer, pieces, lengths, max_length, identity)

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


def encode_beginning(student: Encoder, teachers: Sequence[Encoder], text: str, length: int) -> list[Encoding]:
    """Tokenize a text as far as a sample of `length` student tokens needs it; return the student's, then each
    teacher's.

    The student's first `length` tokens equal those of the full text, and more follow if the full text has more. A
    teacher has all of its tokens that start at most EDGE characters after the first token the student does not read, or
    all tokens if the student reads the full text. The tokens of a part equal the full text's because a seam follows
    them, and MARGIN characters follow the seam. The cost grows with `length` and with the distance to the next seam,
    not with the text. A text without seams, such as one letter repeated millions of times, is tokenized completely.

    Raises DataError for a text with a token that a model cannot read.
    """
    size = _CHARACTERS_A_TOKEN * length + EDGE + MARGIN
    while (encodings := _encodings(student, teachers, text[:size], length, is_whole=size >= len(text))) is None:
        size *= 2
    return encodings


def _encodings(
    student: Encoder, teachers: Sequence[Encoder], part: str, length: int, is_whole: bool
) -> list[Encoding] | None:
    """Tokenize a text or its first part. Return None if more text might change tokens of the sample."""
    latest = len(part) if is_whole else min(len(part) - MARGIN, _start_of_last_run(part))

    def is_settled(side: Encoder, encoding: Encoding, starts: NDArray[np.int64], num_tokens: int) -> bool:
        last = int(np.searchsorted(starts, latest, "right"))
        return is_whole or _find_seam(side.pieces, encoding.ids, num_tokens, last) is not None

    ours, starts = student.located(part)
    if not is_settled(student, ours, starts, length + 1):
        return None
    encodings = [ours]
    stop = starts[length] + EDGE if length < len(starts) else len(part)
    for side in teachers:
        theirs, starts = side.located(part)
        num_tokens = int(np.searchsorted(starts, stop, "right"))
        if not is_settled(side, theirs, starts, num_tokens):
            return None
        encodings.append(theirs.cut(num_tokens))
    return encodings


def locate_beginning(side: ChatEncoder, rendered: RenderedChat, length: int) -> LocatedTokens:
    """Tokenize a conversation far enough to know its first `length` tokens and whether more follow.

    Like `encode_beginning`, it reads on to a seam.
    """
    return _locate_to_seam(
        side, rendered.text, _CHARACTERS_A_TOKEN * length, lambda part: min(len(part.ids), length + 1)
    )


def locate_up_to(side: ChatEncoder, rendered: RenderedChat, place: int) -> LocatedTokens:
    """Tokenize the rendered conversation up to character `place`, plus EDGE characters."""
    stop = min(place + EDGE, len(rendered.text))

    def num_tokens(part: LocatedTokens) -> int:
        return int(np.searchsorted(part.starts, stop, "right"))

    located = _locate_to_seam(side, rendered.text, stop + MARGIN, num_tokens)
    return located.cut(num_tokens(located))


def _locate_to_seam(
    side: ChatEncoder, text: str, num_characters: int, first_end: Callable[[LocatedTokens], int]
) -> LocatedTokens:
    """Return the tokens before the first seam at or after token `first_end(part)`; without a seam, all tokens.

    num_characters: to try first, without the margin.
    """
    size = num_characters + MARGIN
    while size < len(text):
        part = text[:size]
        located = locate_tokens(side.tokenizer, part)
        latest = min(size - MARGIN, _start_of_last_run(part))
        seam = _find_seam(
            side.pieces, located.ids, first_end(located), int(np.searchsorted(located.starts, latest, "right"))
        )
        if seam is not None:
            return located.cut(seam)
        size *= 2
    return locate_tokens(side.tokenizer, text)


def _find_seam(pieces: Pieces, ids: NDArray[np.int32], start: int, stop: int) -> int | None:
    """Return an i in [start, stop), 0 < i < S, with a seam before token i; None if none is found."""
    start = max(start, 1)
    if start >= stop:
        return None
    places = np.unique(np.linspace(start, stop - 1, _MAX_SEAMS_TRIED).astype(np.int64)).tolist()
    return next((i for i in places if is_seam(pieces, ids, i)), None)


def is_seam(pieces: Pieces, ids: NDArray[np.int32], i: int) -> bool:
    """Return whether no token spans the place before token i, 0 < i < S. False next to special and unknown tokens."""
    spellings, longest = _spellings_of(pieces)
    left_pieces = spelled(pieces, reversed(ids[max(0, i - longest) : i].tolist()), longest)[::-1]
    head = b"".join(left_pieces)[-longest:]
    tail = b"".join(spelled(pieces, ids[i : i + longest].tolist(), longest))[:longest]
    return bool(head and tail) and not any(
        _spans(spellings, head[start:], tail) for start in reversed(range(len(head)))
    )


def spelled(pieces: Pieces, ids: Iterable[int], num_bytes: int) -> list[bytes]:
    """Return the bytes of successive ids, up to an id without bytes, or until they have `num_bytes` bytes."""
    spellings: list[bytes] = []
    for token_id in ids:
        piece = pieces.bytes_of(token_id)
        if not piece or num_bytes <= 0:
            break
        spellings.append(piece)
        num_bytes -= len(piece)
    return spellings


def _spans(spellings: list[bytes], head: bytes, tail: bytes) -> bool:
    """Return whether some token consists of `head` and a beginning of `tail`."""
    for stop in range(1, len(tail) + 1):
        spelling = head + tail[:stop]
        index = bisect_left(spellings, spelling)
        if index == len(spellings) or not spellings[index].startswith(spelling):
            return False
        if spellings[index] == spelling:
            return True
    return False


@lru_cache(maxsize=8)
def _spellings_of(pieces: Pieces) -> tuple[list[bytes], int]:
    """Return the bytes of all tokens, sorted, and the length of the longest."""
    spellings = sorted(set(pieces.as_list()))
    return spellings, max(map(len, spellings))


def _start_of_last_run(part: str) -> int:
    """Return the start of the last run of characters of one kind: letters, digits, white space or others.

    More text may lengthen the run and so change how a pre-tokenizer splits all of it: some group digits from the end.
    """
    last_kind = _kind_of(part[-1])
    return next((i + 1 for i in reversed(range(len(part))) if _kind_of(part[i]) != last_kind), 0)


def _kind_of(character: str) -> tuple[bool, bool, bool]:
    return character.isalpha(), character.isnumeric(), character.isspace()
