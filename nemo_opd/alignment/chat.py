"""Aligns one conversation as two tokenizers' chat templates render it (methods.md §1.5)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.history import content_history
from nemo_opd.errors import AlignmentError
from nemo_opd.types import Alignment

if TYPE_CHECKING:
    from nemo_opd.alignment.aligner import TokenAligner
    from nemo_opd.alignment.merge import Spelling
    from nemo_opd.alignment.pieces import Pieces

_Positions = NDArray[np.int64]


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
    said: tuple[tuple[str, ...], ...] = ()
    """Texts by message that its author wrote, however the template renders them; empty where they are unknown."""
    places: NDArray[np.int32] | None = None
    """[M, 2]: tokens among which the template has rendered message k; None: `spans`."""

    @property
    def is_content(self) -> NDArray[np.bool_]:
        """[S]: tokens of contents, not of the template's own text."""
        edges = np.zeros(len(self.ids) + 1, np.int32)
        np.add.at(edges, self.spans[:, 0], 1)
        np.add.at(edges, self.spans[:, 1], -1)
        return np.cumsum(edges[:-1]) > 0

    def cut(self, length: int) -> ChatTokens:
        """Cut to the first `length` tokens, of all messages."""
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
            said=self.said[message:],
            places=places,
        )

    def rendered(self, k: int, spelling: Spelling) -> bytes:
        """Return the bytes of message k in the spelling of `ids`."""
        start, stop = (self.spans if self.places is None else self.places)[k]
        return spelling.data[spelling.edges[start] : spelling.edges[stop]].tobytes()


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
    both = [(p, s, t) for p, (s, t) in enumerate(sides) if len(s) and len(t)]
    parts = [aligner.align(student.ids[s], teacher.ids[t]) for _, s, t in both]
    s_positions, t_positions = [s for _, s, _ in both], [t for _, _, t in both]
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
        history=_histories([p for p, _, _ in both], parts, _content_histories(aligner, student, teacher)),
    )


def _content_histories(aligner: TokenAligner, student: ChatTokens, teacher: ChatTokens) -> NDArray[np.int8]:
    """Compare the two sides' renderings of each message: [M]."""
    ours, theirs = aligner.student_spelling(student.ids), aligner.teacher_spelling(teacher.ids)
    said = student.said or teacher.said or ((),) * len(student.spans)
    read = [
        content_history(student.rendered(k, ours), teacher.rendered(k, theirs), texts) for k, texts in enumerate(said)
    ]
    return np.array(read, np.int8)


def _histories(numbers: list[int], parts: list[Alignment], contents: NDArray[np.int8]) -> NDArray[np.int8]:
    """Return the histories of chunks in the parts with these numbers, of which the odd ones are contents.

    Where both sides hold all that a message says, what differs inside it is the templates' (marks around calls).
    """
    before = np.maximum.accumulate(np.concatenate([[0], contents])).astype(np.int8)
    histories = []
    for p, part in zip(numbers, parts, strict=True):
        k, is_content = divmod(p, 2)
        own = np.minimum(part.history, contents[k]) if is_content else np.zeros_like(part.history)
        histories.append(np.maximum(before[k], own))
    return _joined(histories, np.int8)


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


def _placed_ids(
    chunk_ids: list[NDArray[np.int32]], positions: list[_Positions], parts: list[Alignment], length: int
) -> NDArray[np.int32]:
    """Turn chunk ids of the parts, each counted from 0, into ids over the whole sequence."""
    first = np.cumsum([0, *(part.num_chunks for part in parts)])[:-1]
    numbered = _joined(chunk_ids, np.int32)
    shift = np.repeat(first, [len(ids) for ids in chunk_ids])
    placed = np.full(length, -1, np.int32)
    placed[_joined(positions, np.int64)] = np.where(numbered < 0, -1, numbered + shift)
    return placed


def _placed_bounds(bounds: NDArray[np.int32], positions: list[_Positions], parts: list[Alignment]) -> NDArray[np.int64]:
    """Move bounds [C, 2] within parts to the sequence. A chunk's tokens are neighbours in both."""
    first = np.cumsum([0, *map(len, positions)])[:-1]
    shift = np.repeat(first, [part.num_chunks for part in parts])
    where = _joined(positions, np.int64)
    return np.stack([where[bounds[:, 0] + shift], where[bounds[:, 1] - 1 + shift] + 1], axis=1)


def _joined(arrays: list[NDArray[Any]], dtype: type[np.generic]) -> NDArray[Any]:
    return np.concatenate([np.empty(0, dtype), *arrays])
