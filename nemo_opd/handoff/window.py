"""Windows: what each student rank reads of the output that the teacher's ranks handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.handle import Handle, Message
from nemo_opd.handoff.hidden_states import HeadHandle, HiddenStatesHandle, HiddenStatesWindow
from nemo_opd.handoff.logits import LogitsHandle, LogitsWindow
from nemo_opd.handoff.plan import Piece, Sides, head_pieces, output_pieces, output_shards
from nemo_opd.handoff.region import Region, RegionPart
from nemo_opd.handoff.sparse import SparseHandle, SparseWindow

OutputHandle = HiddenStatesHandle | LogitsHandle | SparseHandle
Window = HiddenStatesWindow | LogitsWindow | SparseWindow


def windows(handles: Sequence[OutputHandle], sides: Sides, lengths: Sequence[int]) -> list[Window]:
    """Return the windows by student rank for one teacher's handles by rank; lengths: of the batch's sequences.

    Each window has the tokens of its rank alone. It reads buffers on other nodes from messages, which must be exchanged
    first (`ExchangePlanner`). Raises ConfigError where the sequences cannot be cut into as many equal parts as the
    student has, HandoffError where a buffer was not exported to a rank that reads it.
    """
    teacher = sides.teacher
    columns = [handles[teacher.rank(0, 0, t)].columns for t in range(teacher.tp)]
    heads = [handle.head for handle in handles if isinstance(handle, HiddenStatesHandle)]
    output_columns = [range(handles[0].output.shape[1])] * teacher.tp if heads else columns
    pieces = output_pieces(sides, output_shards(teacher, lengths, output_columns), lengths)
    size = len(lengths) // sides.student.dp
    own = [tuple(lengths[d * size : (d + 1) * size]) for d in range(sides.student.dp)]
    readers = [_Reader(rank, own[sides.student.coordinates(rank)[0]], sides) for rank in range(sides.student.size)]
    outputs = [handle.output for handle in handles]
    if not heads:
        found = [reader.logits(outputs, own) for reader, own in zip(readers, pieces, strict=True)]
        first = handles[0]
        if not isinstance(first, SparseHandle):
            return list(found)
        return [SparseWindow(window.shards, first.layout) for window in found]
    return [
        HiddenStatesWindow(reader.region(outputs, own), reader.head(heads, shards))
        for reader, own, shards in zip(readers, pieces, head_pieces(sides, columns), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A student rank."""

    rank: int
    lengths: tuple[int, ...]
    """Tokens of each sequence of its window."""
    sides: Sides

    def logits(self, outputs: Sequence[Handle], pieces: Sequence[Piece]) -> LogitsWindow:
        by_column = groupby(sorted(pieces, key=_first_column), _first_column)
        return LogitsWindow(tuple(self.region(outputs, list(own)) for _, own in by_column))

    def region(self, outputs: Sequence[Handle], pieces: Sequence[Piece]) -> Region:
        parts = []
        for piece in pieces:
            handle = self._reachable(outputs[piece.rank], piece.rank, piece.buffer_rows)
            # A message has no other rows.
            first_row = 0 if self.sides.crosses(self.rank, piece.rank) else piece.buffer_rows.start
            parts.append(RegionPart(handle, first_row, piece.window_rows))
        return Region(self.lengths, tuple(parts))

    def head(self, heads: Sequence[HeadHandle | None], shards: Sequence[Piece]) -> tuple[HeadHandle, ...]:
        found = []
        for shard in shards:
            if (head := heads[shard.rank]) is None:
                raise HandoffError(
                    f"teacher rank {shard.rank} was made without readers of its head, and student rank {self.rank} is "
                    "to read it; give the writer every rank that reads it when it is made"
                )
            found.append(head.map(partial(self._reachable, teacher_rank=shard.rank)))
        return tuple(found)

    def _reachable(self, handle: Handle, teacher_rank: int, rows: range | None = None) -> Handle:
        """Return this reader's handle: to the buffer on its node, else to a message with `rows`, by default all."""
        if not self.sides.crosses(self.rank, teacher_rank):
            return handle.for_receiver(self.rank)
        return handle.sent_as(Message(handle.sender, teacher_rank, self.rank, rows or range(handle.shape[0])))


def _first_column(piece: Piece) -> int:
    return piece.columns.start
