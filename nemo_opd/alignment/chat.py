"""Aligns one conversation as two tokenizers' chat templates render it (METHODS §1, Chat)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import AlignmentError
from nemo_opd.types import Alignment

if TYPE_CHECKING:
    from nemo_opd.alignment.aligner import TokenAligner
    from nemo_opd.alignment.pieces import Pieces

Positions = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ChatTokens:
    """A conversation as one tokenizer renders it."""

    ids: NDArray[np.int32]
    """[S]"""
    assistant_mask: NDArray[np.bool_]
    """[S]: what the model itself has to write: an assistant turn from the end of the generation prompt through its
    end-of-turn token."""
    spans: NDArray[np.int32]
    """[M, 2]: tokens of message k's content, [start, stop); increasing and disjoint, empty for an empty content."""

    def cut(self, length: int) -> ChatTokens:
        """The first `length` tokens, of all messages."""
        return ChatTokens(self.ids[:length], self.assistant_mask[:length], np.minimum(self.spans, length))


def align_chat(aligner: TokenAligner, student: ChatTokens, teacher: ChatTokens) -> Alignment:
    """Align contents message by message, and the special tokens of the templates between them by role.

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
    both = [(s, t) for s, t in sides if len(s) and len(t)]
    parts = [aligner.align(student.ids[s], teacher.ids[t]) for s, t in both]
    s_positions, t_positions = [s for s, _ in both], [t for _, t in both]
    s_chunk = _placed_ids([part.student_chunk_id for part in parts], s_positions, parts, len(student.ids))
    t_chunk = _placed_ids([part.teacher_chunk_id for part in parts], t_positions, parts, len(teacher.ids))
    bounds = np.concatenate([np.empty((0, 4), np.int32), *(part.bounds for part in parts)])
    bounds[:, :2] = _placed_bounds(bounds[:, :2], s_positions, parts)
    bounds[:, 2:] = _placed_bounds(bounds[:, 2:], t_positions, parts)
    return Alignment(
        s_chunk,
        t_chunk,
        bounds,
        one_to_one=_joined([part.one_to_one for part in parts], np.bool_),
        inexact=_joined([part.inexact for part in parts], np.bool_),
        special=_joined([part.special for part in parts], np.bool_),
        whitespace=_joined([part.whitespace for part in parts], np.bool_),
        digit=_joined([part.digit for part in parts], np.bool_),
    )


def _parts(tokens: ChatTokens, pieces: Pieces, side: str) -> Iterator[Positions]:
    """Positions of the template's special tokens before content 0, of content 0, of the special tokens after it, …"""
    special = _special_positions(tokens.ids, pieces, side)
    edges = tokens.spans.ravel()
    stops = np.searchsorted(special, [*edges.tolist(), len(tokens.ids)]).tolist()
    yield special[: stops[0]]
    for k, (start, stop) in enumerate(tokens.spans.tolist()):
        yield np.arange(start, stop)
        yield special[stops[2 * k + 1] : stops[2 * k + 2]]


def _special_positions(ids: NDArray[np.int32], pieces: Pieces, side: str) -> Positions:
    outside = np.flatnonzero((ids < 0) | (ids >= pieces.vocab_size))
    if len(outside):
        position = int(outside[0])
        raise AlignmentError(
            f"token {position} of the {side}'s conversation is {ids[position]}, outside the vocabulary of size "
            f"{pieces.vocab_size}; was it rendered with the {side}'s tokenizer?"
        )
    return np.flatnonzero(pieces.lengths[ids] == 0)


def _placed_ids(
    chunk_ids: list[NDArray[np.int32]], positions: list[Positions], parts: list[Alignment], length: int
) -> NDArray[np.int32]:
    """Chunk ids of the parts, each counted from 0, as ids over the whole sequence."""
    first = np.cumsum([0, *(part.num_chunks for part in parts)])[:-1]
    numbered = _joined(chunk_ids, np.int32)
    shift = np.repeat(first, [len(ids) for ids in chunk_ids])
    placed = np.full(length, -1, np.int32)
    placed[_joined(positions, np.int64)] = np.where(numbered < 0, -1, numbered + shift)
    return placed


def _placed_bounds(bounds: NDArray[np.int32], positions: list[Positions], parts: list[Alignment]) -> NDArray[np.int64]:
    """[C, 2] within the parts → within the sequence. A chunk's tokens are neighbours in both."""
    first = np.cumsum([0, *map(len, positions)])[:-1]
    shift = np.repeat(first, [part.num_chunks for part in parts])
    where = _joined(positions, np.int64)
    return np.stack([where[bounds[:, 0] + shift], where[bounds[:, 1] - 1 + shift] + 1], axis=1)


def _joined(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])
