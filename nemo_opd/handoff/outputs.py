"""The outputs that a teacher can hand over: hidden states, logits, or its likeliest tokens (methods.md §9).

A teacher rank's writer fills buffers and gives a handle to them; a student rank's window reads the buffers of several
teacher ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.handoff.buffer import Handle, Message, Receiver, Sender
from nemo_opd.handoff.slices import (
    ONE_READER,
    BufferSlice,
    LayoutPair,
    Readers,
    head_pieces,
    output_pieces,
    output_shards,
    overlap,
    within_vocabulary,
)
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import LogitRows, SparseLayout, SparseLogits, TensorLogits, TrainableRows
from nemo_opd.logits.sources import PackedLogits, SideBySideLogits, places_in_row, token_bounds

_REORDERED_ROWS = 8192
"""Rows of a head that are reordered at a time, as memory holds no second head."""


@dataclass(frozen=True, slots=True)
class BufferView:
    """A tensor [tokens, columns] of consecutive sequences, split by rows into parts."""

    lengths: tuple[int, ...]
    """Tokens of each sequence."""
    parts: tuple[_ViewPart, ...]

    def read(self, receiver: Receiver, sequences: slice) -> Tensor:
        """Return the tokens of some sequences: [n, columns].

        The result is a view if one buffer holds all of them and the device can read it, else a copy. Raises
        HandoffError if a buffer cannot be mapped.
        """
        # Map every buffer, needed now or not: each export is a reference that only its receiver can release.
        mapped = [receiver.tensor(part.handle) for part in self.parts]
        start, stop, _ = sequences.indices(len(self.lengths))
        bounds = token_bounds(self.lengths)
        requested = range(bounds[start], bounds[stop])
        sources: list[Tensor] = []
        for part, buffer in zip(self.parts, mapped, strict=True):
            if shared := overlap(part.rows, requested):
                begin = part.first_row + shared.start - part.rows.start
                sources.append(receiver.near(buffer[begin : begin + len(shared)]))
        if len(sources) == 1:
            return sources[0]
        receiver.copied_bytes += sum(source.nbytes for source in sources)
        return torch.cat(sources)

    def logits(
        self, tokens: TrainableRows, sequences: slice, width: int, moved_by: Tensor | None = None
    ) -> PackedLogits:
        """Arrange packed logits [1, n, X] of some sequences as [b, width, X].

        moved_by: int64 [b] on the host; position i of a sequence gets the logits of its token i + moved_by.
        """
        (places,) = to_device_batched([places_in_row(self.lengths[sequences], width, moved_by)], tokens.device)
        return PackedLogits(tokens, places)


@dataclass(frozen=True, slots=True)
class _ViewPart:
    """Rows of a view, and the buffer that holds them."""

    handle: Handle
    first_row: int
    """First row of the part in the buffer."""
    rows: range
    """Rows of the view."""


NewSender = Callable[[Sequence[int]], Sender]
"""Function that creates a sender for the receivers with these numbers."""


class _OutputWriter:
    """Output buffers [tokens, columns], one per batch in flight, filled microbatch by microbatch."""

    def __init__(
        self, new_sender: NewSender, num_columns: int, dtype: torch.dtype, readers: Readers, num_slots: int
    ) -> None:
        self._slots = [new_sender(readers.output) for _ in range(num_slots)]
        self._output = self._slots[0]
        """The slot that is being written."""
        self._num_columns, self._dtype = num_columns, dtype

    def begin(self, num_tokens: int, slot: int = 0) -> None:
        """Start a batch, which overwrites the slot's previous batch."""
        self._output = self._slots[slot]
        self._output.tensor((num_tokens, self._num_columns), self._dtype)

    def _put(self, start: int, output: Tensor) -> None:
        """Start copying a microbatch's output [1, n, columns] to the rows from `start` on; `handle` waits for it."""
        self._output.last[start : start + output.shape[1]].copy_(output.squeeze(0), non_blocking=True)

    @property
    def senders(self) -> tuple[Sender, ...]:
        return tuple(self._slots)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        for sender in self.senders:
            sender.close()


@dataclass(frozen=True, slots=True)
class HeadHandle:
    """Reference to a rank's shard of the head."""

    weight: Handle
    """[columns, E]"""
    bias: Handle | None
    scale: float
    soft_cap: float | None

    def head(self, receiver: Receiver) -> Head:
        """Return the shard. Raises HandoffError if a buffer cannot be mapped."""
        bias = None if self.bias is None else receiver.constant(self.bias)
        return Head(receiver.constant(self.weight), bias, self.scale, self.soft_cap)


@dataclass(frozen=True, slots=True)
class HiddenStatesHandle:
    """Reference to a teacher rank's final hidden states [tokens, E] of a batch, and to its head shard."""

    output: Handle
    head: HeadHandle | None
    """None if no student rank reads this rank's shard."""
    columns: range
    """The shard's columns of the tokenizer's vocabulary."""


@dataclass(frozen=True, slots=True)
class HiddenStatesWindow:
    """The hidden states [tokens, E] of a student rank's sequences, and the head."""

    hidden: BufferView
    head: tuple[HeadHandle, ...]
    """Shards with consecutive columns."""

    def rows(self, receiver: Receiver, sequences: slice, width: int, moved_by: Tensor | None = None) -> LogitRows:
        """Return the logits [b, width, W] of some sequences, computed when a loss reads them.

        moved_by: as for `BufferView.logits`. Hidden states are a view if they are in one buffer, else a concatenated
        copy. Shards of the head stay separate; their columns are read side by side. Raises HandoffError if a buffer
        cannot be mapped.
        """
        hidden = self.hidden.read(receiver, sequences).unsqueeze(0)
        heads = (shard.head(receiver) for shard in self.head)
        shards = [self.hidden.logits(HeadLogits(hidden, head), sequences, width, moved_by) for head in heads]
        return shards[0] if len(shards) == 1 else SideBySideLogits(shards)


class HiddenStatesWriter(_OutputWriter):
    """Writer of a teacher rank's hidden states; the head has separate buffers."""

    def __init__(
        self,
        new_sender: NewSender,
        vocab_size: int,
        hidden_size: int,
        dtype: torch.dtype,
        *,
        columns: range,
        readers: Readers = ONE_READER,
        num_slots: int = 1,
        is_fixed: bool = True,
        order: NDArray[np.int64] | None = None,
    ) -> None:
        """Create the senders.

        columns: vocabulary range of this rank's head shard; rows beyond `vocab_size` are dropped, so a shard may become
        empty. dtype: dtype of the buffer and the head. num_slots: batches of hidden states stored at once.
        is_fixed: False if the head changes with each batch and is handed over each time. order: token of each row of
        the head that is handed over, if the shard is the whole head; by default its id.
        """
        super().__init__(new_sender, hidden_size, dtype, readers, num_slots)
        self._weight, self._bias = new_sender(readers.head), new_sender(readers.head)
        self._columns = within_vocabulary(columns, vocab_size)
        self._is_head_read = bool(readers.head) or readers.sends_head
        self._is_fixed = is_fixed
        self._order = None if order is None else torch.tensor(order)
        self._head: HeadHandle | None = None

    def begin(self, num_tokens: int, slot: int = 0) -> None:
        super().begin(num_tokens, slot)
        if not self._is_fixed:
            self._head = None

    def write(self, start: int, output: TensorLogits | HeadLogits) -> None:
        """Write a microbatch's hidden states [1, n, E] to the tokens from `start` on; the first time also the head."""
        assert isinstance(output, HeadLogits)
        if self._head is None and self._is_head_read:
            head = output.head
            bias = None if head.bias is None else self._copy(head.bias, self._bias)
            self._head = HeadHandle(self._copy(head.weight, self._weight), bias, head.scale, head.soft_cap)
        self._put(start, output.hidden)

    def handle(self) -> HiddenStatesHandle:
        return HiddenStatesHandle(self._output.handle(), self._head, self._columns)

    @property
    def senders(self) -> tuple[Sender, ...]:
        return (*self._slots, self._weight, self._bias)

    def close(self) -> None:
        """Release the buffers; may be called again."""
        super().close()
        self._head = None

    def _copy(self, parameter: Tensor, sender: Sender) -> Handle:
        values = parameter.detach()[: len(self._columns)]
        buffer = sender.tensor(values.shape, self._dtype)
        if self._order is None:
            buffer.copy_(values)
        else:
            order = self._order.to(values.device)
            for part, rows in zip(buffer.split(_REORDERED_ROWS), order.split(_REORDERED_ROWS), strict=True):
                part.copy_(values.index_select(0, rows))
        return sender.handle()


@dataclass(frozen=True, slots=True)
class LogitsHandle:
    """Reference to a teacher rank's logits of a batch: [tokens, columns]."""

    output: Handle
    columns: range
    """Columns of the tokenizer's vocabulary."""


@dataclass(frozen=True, slots=True)
class LogitsWindow:
    """The logits [tokens, W] of a student rank's sequences."""

    shards: tuple[BufferView, ...]
    """Consecutive columns of the vocabulary."""

    def rows(self, receiver: Receiver, sequences: slice, width: int, moved_by: Tensor | None = None) -> LogitRows:
        """Return the logits [b, width, W] of some sequences.

        moved_by: as for `BufferView.logits`. Rows in one buffer are a view, rows of several buffers a concatenated
        copy; column shards are read side by side without a copy. Raises HandoffError if a buffer cannot be mapped.
        """
        shards = [
            shard.logits(TensorLogits(shard.read(receiver, sequences).unsqueeze(0)), sequences, width, moved_by)
            for shard in self.shards
        ]
        return shards[0] if len(shards) == 1 else SideBySideLogits(shards)


class LogitsWriter(_OutputWriter):
    """Writer of a teacher rank's logits."""

    def __init__(
        self,
        new_sender: NewSender,
        vocab_size: int,
        dtype: torch.dtype,
        *,
        columns: range,
        readers: Readers = ONE_READER,
        num_slots: int = 1,
    ) -> None:
        """Create the senders.

        columns: vocabulary range of this rank's logits; columns beyond `vocab_size` are dropped. dtype: dtype of the
        buffer. num_slots: batches stored at once.
        """
        self._columns = within_vocabulary(columns, vocab_size)
        super().__init__(new_sender, len(self._columns), dtype, readers, num_slots)

    def write(self, start: int, output: TensorLogits | HeadLogits) -> None:
        """Write a microbatch's logits [1, n, ·] to the tokens from `start` on."""
        assert isinstance(output, TensorLogits)
        (logits,) = output.leaves
        self._put(start, logits[..., : len(self._columns)])

    def handle(self) -> LogitsHandle:
        return LogitsHandle(self._output.handle(), self._columns)


@dataclass(frozen=True, slots=True)
class SparseHandle:
    """Reference to a teacher rank's rows of a batch: uint8 [tokens, bytes]."""

    output: Handle
    layout: SparseLayout

    @property
    def columns(self) -> range:
        """Columns of the buffer."""
        return range(self.layout.handed_bytes)


@dataclass(frozen=True, slots=True)
class SparseWindow:
    """Encoded rows for a student rank's sequences."""

    shards: tuple[BufferView, ...]
    """One view, because rows are not split over teacher ranks."""
    layout: SparseLayout

    def rows(self, receiver: Receiver, sequences: slice, width: int, moved_by: Tensor | None = None) -> LogitRows:
        """Return the logits [b, width, W] of some sequences.

        moved_by: as for `BufferView.logits`. Raises HandoffError if a buffer cannot be mapped.
        """
        (view,) = self.shards
        rows = view.read(receiver, sequences)
        (places,) = to_device_batched([places_in_row(view.lengths[sequences], width, moved_by)], rows.device)
        return SparseLogits(rows, self.layout, places)


class SparseWriter(_OutputWriter):
    """Writer of a teacher rank's encoded rows."""

    def __init__(
        self, new_sender: NewSender, layout: SparseLayout, *, readers: Readers = ONE_READER, num_slots: int = 1
    ) -> None:
        super().__init__(new_sender, layout.handed_bytes, torch.uint8, readers, num_slots)
        self._layout = layout

    def write(self, start: int, output: SparseLogits) -> None:
        """Write a microbatch's rows to the tokens from `start` on."""
        self._put(start, output.rows.unsqueeze(0))

    def handle(self) -> SparseHandle:
        return SparseHandle(self._output.handle(), self._layout)


OutputHandle = HiddenStatesHandle | LogitsHandle | SparseHandle
Window = HiddenStatesWindow | LogitsWindow | SparseWindow


def windows(handles: Sequence[OutputHandle], sides: LayoutPair, lengths: Sequence[int]) -> list[Window]:
    """Return the window of each student rank, with the tokens of that rank only.

    handles: one for each teacher rank. lengths: tokens of each sequence of the batch. Buffers on other nodes are read
    from messages, which must be exchanged first (`ExchangePlanner`).
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
        HiddenStatesWindow(reader.view(outputs, rank_pieces), reader.head(heads, shards))
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
        return LogitsWindow(tuple(self.view(outputs, list(shard)) for _, shard in by_column))

    def view(self, outputs: Sequence[Handle], pieces: Sequence[BufferSlice]) -> BufferView:
        parts = []
        for piece in pieces:
            handle = self._reachable(outputs[piece.rank], piece.rank, piece.buffer_rows)
            # A message contains only these rows.
            first_row = 0 if self.sides.crosses(self.rank, piece.rank) else piece.buffer_rows.start
            parts.append(_ViewPart(handle, first_row, piece.window_rows))
        return BufferView(self.lengths, tuple(parts))

    def head(self, heads: Sequence[HeadHandle | None], shards: Sequence[BufferSlice]) -> tuple[HeadHandle, ...]:
        handles = []
        for shard in shards:
            head = heads[shard.rank]
            assert head is not None, "`planned_readers` names every rank that reads a head"
            bias = None if head.bias is None else self._reachable(head.bias, shard.rank)
            handles.append(replace(head, weight=self._reachable(head.weight, shard.rank), bias=bias))
        return tuple(handles)

    def _reachable(self, handle: Handle, teacher_rank: int, rows: range | None = None) -> Handle:
        """Return this rank's handle: to the buffer if on its node, else to a message with `rows` (default: all)."""
        if not self.sides.crosses(self.rank, teacher_rank):
            return handle.for_receiver(self.rank)
        return handle.sent_as(Message(handle.sender, teacher_rank, self.rank, rows or range(handle.shape[0])))


def _first_column(piece: BufferSlice) -> int:
    return piece.columns.start
