"""From what every teacher rank handed over to what every student rank reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from nemo_opd.handoff.base import Handle
from nemo_opd.handoff.hidden_states import HiddenStatesHandle, HiddenStatesWindow
from nemo_opd.handoff.logits import LogitsHandle, LogitsWindow
from nemo_opd.handoff.parcel import Parcel
from nemo_opd.handoff.plan import Block, Piece, Sides, head_pieces, output_pieces
from nemo_opd.handoff.region import Part, Region

OutputHandle = HiddenStatesHandle | LogitsHandle
Window = HiddenStatesWindow | LogitsWindow


def windows(handles: Sequence[OutputHandle], sides: Sides) -> list[Window]:
    """One teacher's handles by its rank → windows by student rank, each with its own exports of the buffers it needs.

    What is on another node is read where it arrives, and must be sent first (`Post` says what).
    The rows of a data-parallel part are those of its buffers. Raises ConfigError where they cannot be cut into as many
    equal parts as the student has, HandoffError where a buffer was not exported to a rank that reads it.
    """
    if isinstance(handles[0], LogitsHandle):
        return list(_logits([handle for handle in handles if isinstance(handle, LogitsHandle)], sides))
    return list(_hidden_states([handle for handle in handles if isinstance(handle, HiddenStatesHandle)], sides))


def _hidden_states(handles: Sequence[HiddenStatesHandle], sides: Sides) -> Sequence[HiddenStatesWindow]:
    hidden_size = handles[0].hidden.shape[2]
    buffers = [handle.hidden for handle in handles]
    blocks = _blocks(handles, buffers, [range(hidden_size)] * len(handles), sides)
    num_rows = _num_rows(buffers, sides)
    columns = [handles[sides.teacher.rank(0, 0, t)].columns for t in range(sides.teacher.tp)]
    found = []
    outputs, heads = output_pieces(sides, blocks, num_rows, hidden_size), head_pieces(sides, columns)
    for student_rank, (output, head) in enumerate(zip(outputs, heads, strict=True)):
        reader = _Reader(student_rank, sides)
        hidden = reader.region(output, buffers, num_rows // sides.student.dp, range(hidden_size))
        shards = tuple(handles[piece.rank].head_for(student_rank, reader.sent_by(piece.rank)) for piece in head)
        found.append(HiddenStatesWindow(hidden, shards))
    return found


def _logits(handles: Sequence[LogitsHandle], sides: Sides) -> Sequence[LogitsWindow]:
    buffers = [handle.logits for handle in handles]
    blocks = _blocks(handles, buffers, [handle.columns for handle in handles], sides)
    num_rows = _num_rows(buffers, sides)
    vocab_size = max(handle.columns.stop for handle in handles)
    found = []
    for student_rank, pieces in enumerate(output_pieces(sides, blocks, num_rows, vocab_size)):
        own_rows = num_rows // sides.student.dp
        by_columns = groupby(sorted(pieces, key=_first_column), key=lambda piece: piece.target.columns)
        reader = _Reader(student_rank, sides)
        shards = (reader.region(list(part), buffers, own_rows, columns) for columns, part in by_columns)
        found.append(LogitsWindow(tuple(shards)))
    return found


def _first_column(piece: Piece) -> int:
    return piece.target.columns.start


def _num_rows(buffers: Sequence[Handle], sides: Sides) -> int:
    """Of the global batch."""
    return sum(buffers[sides.teacher.rank(d)].shape[0] for d in range(sides.teacher.dp))


def _blocks(
    handles: Sequence[OutputHandle], buffers: Sequence[Handle], columns: Sequence[range], sides: Sides
) -> list[Block]:
    blocks = []
    own_rows = _num_rows(buffers, sides) // sides.teacher.dp
    for rank, handle in enumerate(handles):
        first = sides.teacher.coordinates(rank)[0] * own_rows
        for written in handle.written:
            rows = range(first + written.rows.start, first + written.rows.stop)
            blocks.append(Block(rank, written.rows.start, rows, written.positions, columns[rank]))
    return blocks


@dataclass(frozen=True, slots=True)
class _Reader:
    """A student rank."""

    rank: int
    sides: Sides

    def sent_by(self, teacher_rank: int) -> int | None:
        """The rank itself where it is on another node; None: its buffers are mapped."""
        return teacher_rank if self.sides.crosses(self.rank, teacher_rank) else None

    def region(self, pieces: Sequence[Piece], buffers: Sequence[Handle], num_rows: int, columns: range) -> Region:
        """Pieces of a window, in the buffers of teacher ranks; `columns` of the window make up the region."""
        parts = tuple(self._part(place, piece, buffers[piece.rank], columns) for place, piece in enumerate(pieces))
        return Region(num_rows, len(columns), parts)

    def _part(self, place: int, piece: Piece, buffer: Handle, columns: range) -> Part:
        target = piece.target.shifted(0, 0, -columns.start)
        if self.sent_by(piece.rank) is None:
            return Part(buffer.for_receiver(self.rank), piece.source, target)
        parcel = Parcel(buffer.sender, piece.rank, piece.source)
        return Part(buffer.sent_to(self.rank, parcel, place), piece.source.at_origin, target)
