"""Windows: each student rank's view of the output that the teacher's ranks handed over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.handle import Handle, Message
from nemo_opd.handoff.hidden_states import HeadHandle, HiddenStatesHandle, HiddenStatesWindow
from nemo_opd.handoff.logits import LogitsHandle, LogitsWindow
from nemo_opd.handoff.plan import BufferSlice, LayoutPair, head_pieces, output_pieces, output_shards
from nemo_opd.handoff.region import BufferView, RegionPart
from nemo_opd.handoff.sparse import SparseHandle, SparseWindow

OutputHandle = HiddenStatesHandle | LogitsHandle | SparseHandle
Window = HiddenStatesWindow | LogitsWindow | SparseWindow


def windows(handles: Sequence[OutputHandle], sides: LayoutPair, lengths: Sequence[int]) -> list[Window]:
    """Return the window of each student rank, with the tokens of that rank only.

    handles: one for each teacher rank. lengths: tokens of each sequence of the batch. Buffers on other nodes are read
    from messages, which must be exchanged first (`ExchangePlanner`). Raises ConfigError if the sequences cannot be
    split evenly over the student's or the teacher's data-parallel ranks, and HandoffError if a buffer was not exported
    to a rank that reads it.
    """
    teacher = sides.teacher
    columns = [handles[teacher.rank(0, 0, t)].columns for t in range(teacher.tp)]
    heads = [handle.head for handle in handles if isinstance(handle, HiddenStatesHandle)]
    output_columns = [range(handles[0].output.shape[1])] * teacher.tp if heads else columns
    pieces = output_pieces(sides, output_shards(teacher, lengths, output_columns), lengths)
    size = len(lengths) // sides.student.dp
    parts = [tuple(lengths[d * size : (d + 1) * size]) for d in range(sides.student.dp)]
    readers = [_Reader(rank, parts[sides.student.coordinates(rank)[0]], sides) for rank in range(sides.student.size)]
    outputs = [handle.output for handle in handles]
    if not heads:
        logits = [reader.logits(outputs, rank_pieces) for reader, rank_pieces in zip(readers, pieces, strict=True)]
        first = handles[0]
        if not isinstance(first, SparseHandle):
            return list(logits)
        return [SparseWindow(window.shards, first.layout) for window in logits]
    return [
        HiddenStatesWindow(reader.region(outputs, rank_pieces), reader.head(heads, shards))
        for reader, rank_pieces, shards in zip(readers, pieces, head_pieces(sides, columns), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class _Reader:
    """A student rank, which builds its window from pieces."""

    rank: int
    lengths: tuple[int, ...]
    """Tokens of each sequence in its window."""
    sides: LayoutPair

    def logits(self, outputs: Sequence[Handle], pieces: Sequence[BufferSlice]) -> LogitsWindow:
        by_column = groupby(sorted(pieces, key=_first_column), _first_column)
        return LogitsWindow(tuple(self.region(outputs, list(shard)) for _, shard in by_column))

    def region(self, outputs: Sequence[Handle], pieces: Sequence[BufferSlice]) -> BufferView:
        parts = []
        for piece in pieces:
            handle = self._reachable(outputs[piece.rank], piece.rank, piece.buffer_rows)
            # A message contains only these rows.
            first_row = 0 if self.sides.crosses(self.rank, piece.rank) else piece.buffer_rows.start
            parts.append(RegionPart(handle, first_row, piece.window_rows))
        return BufferView(self.lengths, tuple(parts))

    def head(self, heads: Sequence[HeadHandle | None], shards: Sequence[BufferSlice]) -> tuple[HeadHandle, ...]:
        handles = []
        for shard in shards:
            if (head := heads[shard.rank]) is None:
                raise HandoffError(
                    f"student rank {self.rank} reads the head of teacher rank {shard.rank}, which was created without "
                    "readers of its head; create the writer with every rank that reads it"
                )
            handles.append(head.map(partial(self._reachable, teacher_rank=shard.rank)))
        return tuple(handles)

    def _reachable(self, handle: Handle, teacher_rank: int, rows: range | None = None) -> Handle:
        """Return this rank's handle: to the buffer if on its node, else to a message with `rows` (default: all)."""
        if not self.sides.crosses(self.rank, teacher_rank):
            return handle.for_receiver(self.rank)
        return handle.sent_as(Message(handle.sender, teacher_rank, self.rank, rows or range(handle.shape[0])))


def _first_column(piece: BufferSlice) -> int:
    return piece.columns.start
