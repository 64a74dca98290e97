"""Alignment of one conversation that two tokenizers' chat templates render, and tokens with their places in a text
(methods.md §1.5).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.aligner import content_history
from nemo_opd.alignment.chat_turns import Span
from nemo_opd.errors import AlignmentError
from nemo_opd.types import Alignment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nemo_opd.alignment.aligner import TokenAligner
    from nemo_opd.alignment.pieces import Pieces
    from nemo_opd.alignment.spelling import Spelling

_Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A conversation as one tokenizer renders it."""

    ids: NDArray[np.int32]
    """[S]"""
    assistant_mask: NDArray[np.bool_]
    """[S]: tokens that the model itself writes: assistant turns from the generation prompt's end through their end
    tokens.
    """
    spans: NDArray[np.int32]
    """[M, 2]: range [start, stop) of message k's content tokens; increasing and disjoint, empty for an empty content.
    """
    texts: tuple[tuple[str, ...], ...] = ()
    """Texts that each message's author wrote, however the template renders them; empty if unknown."""
    places: NDArray[np.int32] | None = None
    """[M, 2]: range of tokens that the template rendered for message k; None if it equals `spans`."""

    @property
    def is_content(self) -> NDArray[np.bool_]:
        """[S]: whether a token belongs to a content rather than to the template's own text."""
        edges = np.zeros(len(self.ids) + 1, np.int32)
        np.add.at(edges, self.spans[:, 0], 1)
        np.add.at(edges, self.spans[:, 1], -1)
        return np.cumsum(edges[:-1]) > 0

    def cut(self, length: int) -> ChatTokens:
        """Cut to the first `length` tokens; all messages stay."""
        places = None if self.places is None else np.minimum(self.places, length)
        return replace(
            self,
            ids=self.ids[:length],
            assistant_mask=self.assistant_mask[:length],
            spans=np.minimum(self.spans, length),
            places=places,
        )

    def after(self, start: int, message: int) -> ChatTokens:
        """Return the tokens from `start` on, and the messages from `message` on, which begin there."""
        places = None if self.places is None else np.maximum(self.places[message:] - start, 0).astype(np.int32)
        return replace(
            self,
            ids=self.ids[start:],
            assistant_mask=self.assistant_mask[start:],
            spans=np.maximum(self.spans[message:] - start, 0).astype(np.int32),
            texts=self.texts[message:],
            places=places,
        )

    def rendered(self, k: int, spelling: Spelling) -> bytes:
        """Return the bytes of message k. spelling: of `ids`."""
        start, stop = (self.spans if self.places is None else self.places)[k]
        return spelling.data[spelling.edges[start] : spelling.edges[stop]].tobytes()


def align_chat(aligner: TokenAligner, student: ChatTokens, teacher: ChatTokens) -> Alignment:
    """Align contents message by message, and the templates' special tokens between them by role.

    The templates' own text has no partner, and no chunk crosses the edge of a content. Either side may have been cut.
    Raises AlignmentError for different numbers of messages and for ids outside a vocabulary.
    """
    if len(student.spans) != len(teacher.spans):
        raise AlignmentError(
            f"the student's side has {len(student.spans)} messages and the teacher's {len(teacher.spans)}; "
            "render the same conversation on both sides"
        )
    sides = zip(
        _parts(student, aligner.student_pieces, "student"),
        _parts(teacher, aligner.teacher_pieces, "teacher"),
        strict=True,
    )
    both = [(p, s, t) for p, (s, t) in enumerate(sides) if len(s) and len(t)]
    parts = [aligner.align(student.ids[s], teacher.ids[t]) for _, s, t in both]
    s_positions, t_positions = [s for _, s, _ in both], [t for _, _, t in both]
    s_chunk = _sequence_ids([part.student_chunk_id for part in parts], s_positions, parts, len(student.ids))
    t_chunk = _sequence_ids([part.teacher_chunk_id for part in parts], t_positions, parts, len(teacher.ids))
    bounds = np.concatenate([np.empty((0, 4), np.int32), *(part.bounds for part in parts)])
    bounds[:, :2] = _sequence_bounds(bounds[:, :2], s_positions, parts)
    bounds[:, 2:] = _sequence_bounds(bounds[:, 2:], t_positions, parts)
    return Alignment(
        s_chunk,
        t_chunk,
        bounds,
        one_to_one=_concatenate([part.one_to_one for part in parts], np.bool_),
        inexact=_concatenate([part.inexact for part in parts], np.bool_),
        special=_concatenate([part.special for part in parts], np.bool_),
        whitespace=_concatenate([part.whitespace for part in parts], np.bool_),
        digit=_concatenate([part.digit for part in parts], np.bool_),
        history=_histories([p for p, _, _ in both], parts, _content_histories(aligner, student, teacher)),
    )


@dataclass(frozen=True, slots=True)
class LocatedTokens:
    """A text, its tokens, and the characters that each token stands for."""

    text: str
    ids: NDArray[np.int32]
    """[S]"""
    starts: NDArray[np.int64]
    """[S]: first character; tokens of the same character share it."""
    ends: NDArray[np.int64]
    """[S]: end of the last character."""

    def at(self, character: int) -> int:
        """Return the first token with text at or after a character."""
        return int(np.searchsorted(self.ends, character, "right"))

    def spans(self, contents: Sequence[Span | None]) -> NDArray[np.int32]:
        """Return token spans [M, 2] of contents.

        A token across an edge belongs to the content; one across two contents, to the first.
        """
        spans = np.zeros((len(contents), 2), np.int32)
        previous = 0
        for k, content in enumerate(contents):
            start = stop = previous
            if content is not None:
                start = max(previous, self.at(content.start))
                following = int(np.searchsorted(self.starts, content.stop, "left"))
                stop = max(start, following) if content.stop > content.start else start
            spans[k] = start, stop
            previous = stop
        return spans

    def inside(self, span: Span, added: Collection[int]) -> slice:
        """Return the tokens of a span that the model writes.

        A token across the beginning is the model's, unless it is an added token: a header's last token may absorb the
        white space after it.
        """
        if span.start == span.stop:
            return slice(0, 0)
        first = self.at(span.start)
        if first < len(self.ids) and self.starts[first] < span.start and int(self.ids[first]) in added:
            first += 1
        return slice(first, int(np.searchsorted(self.starts, span.stop, "left")))


def locate_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> LocatedTokens:
    """Tokenize a rendered text. The template writes special tokens itself, so none are added.

    Characters that no token claims go to a neighbour: spaces that some tokenizers trim from a token's offsets go to
    that token; marks that a normaliser composed with the character before go to that character's token.
    """
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
    starts, ends = offsets[:, 0].copy(), offsets[:, 1].copy()
    for i in np.flatnonzero(starts[1:] > ends[:-1]).tolist():
        if text[ends[i] : starts[i + 1]].isspace():
            starts[i + 1] = ends[i]
        else:
            ends[i] = starts[i + 1]
    return LocatedTokens(text, np.array(encoded["input_ids"], np.int32), starts, ends)


def _content_histories(aligner: TokenAligner, student: ChatTokens, teacher: ChatTokens) -> NDArray[np.int8]:
    """Compare the two sides' renderings of each message: [M]."""
    ours, theirs = aligner.student_spelling(student.ids), aligner.teacher_spelling(teacher.ids)
    texts = student.texts or teacher.texts or ((),) * len(student.spans)
    histories = [
        content_history(student.rendered(k, ours), teacher.rendered(k, theirs), written)
        for k, written in enumerate(texts)
    ]
    return np.array(histories, np.int8)


def _histories(numbers: list[int], parts: list[Alignment], contents: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return the histories of the chunks in these parts; parts with odd numbers are contents.

    If both sides contain all texts of a message, differences inside it are the templates' (marks around calls).
    """
    earlier = np.maximum.accumulate(np.concatenate([[0], contents])).astype(np.int8)
    histories = []
    for p, part in zip(numbers, parts, strict=True):
        k, is_content = divmod(p, 2)
        history = np.minimum(part.history, contents[k]) if is_content else np.zeros_like(part.history)
        histories.append(np.maximum(earlier[k], history))
    return _concatenate(histories, np.int8)


def _parts(tokens: ChatTokens, pieces: Pieces, side: str) -> Iterator[_Positions]:
    """Yield the positions of the special tokens before content 0, of content 0, of the special tokens after it, …"""
    special = _special_positions(tokens.ids, pieces, side)
    edges = tokens.spans.ravel()
    stops = np.searchsorted(special, [*edges.tolist(), len(tokens.ids)]).tolist()
    yield special[: stops[0]]
    for k, (start, stop) in enumerate(tokens.spans.tolist()):
        yield np.arange(start, stop)
        yield special[stops[2 * k + 1] : stops[2 * k + 2]]


def _special_positions(ids: NDArray[np.int32], pieces: Pieces, side: str) -> _Positions:
    outside = np.flatnonzero((ids < 0) | (ids >= pieces.vocab_size))
    if len(outside):
        position = int(outside[0])
        raise AlignmentError(
            f"token {position} of the {side}'s conversation is {ids[position]}, outside the vocabulary of size "
            f"{pieces.vocab_size}; was it rendered with the {side}'s tokenizer?"
        )
    return np.flatnonzero(pieces.lengths[ids] == 0)


def _sequence_ids(
    chunk_ids: list[NDArray[np.int32]], positions: list[_Positions], parts: list[Alignment], length: int
) -> NDArray[np.int32]:
    """Turn the parts' chunk ids, each counted from 0, into ids over the full sequence."""
    first = np.cumsum([0, *(part.num_chunks for part in parts)])[:-1]
    ids_in_parts = _concatenate(chunk_ids, np.int32)
    shift = np.repeat(first, [len(ids) for ids in chunk_ids])
    sequence_ids = np.full(length, -1, np.int32)
    sequence_ids[_concatenate(positions, np.int64)] = np.where(ids_in_parts < 0, -1, ids_in_parts + shift)
    return sequence_ids


def _sequence_bounds(
    bounds: NDArray[np.int32], positions: list[_Positions], parts: list[Alignment]
) -> NDArray[np.int64]:
    """Move bounds [C, 2] from parts to the sequence. A chunk's tokens are adjacent in both."""
    first = np.cumsum([0, *map(len, positions)])[:-1]
    shift = np.repeat(first, [part.num_chunks for part in parts])
    position_of = _concatenate(positions, np.int64)
    return np.stack([position_of[bounds[:, 0] + shift], position_of[bounds[:, 1] - 1 + shift] + 1], axis=1)


def _concatenate(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])
