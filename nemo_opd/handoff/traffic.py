"""Readers of each buffer and the bytes sent between nodes, computed before anything loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from nemo_opd.errors import ConfigError
from nemo_opd.handoff.plan import (
    BufferSlice,
    LayoutPair,
    Readers,
    head_pieces,
    output_pieces,
    output_shards,
    reading_ranks,
    vocabulary_columns,
)

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Payload:
    """The largest output of a teacher for a batch."""

    num_sequences: int
    """Sequences per global batch."""
    length: int
    """Tokens per sequence."""
    vocab_size: int
    hidden_size: int | None
    """None if logits are handed over."""
    itemsize: int
    """Bytes per element."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one student rank, or all of them together, read from teachers on other nodes."""

    output: int = 0
    """Bytes of output per batch."""
    head: int = 0
    """Bytes of heads per run."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.output + other.output, self.head + other.head)

    def __bool__(self) -> bool:
        return bool(self.output or self.head)


def planned_readers(sides: LayoutPair, payload: Payload) -> tuple[Readers, ...]:
    """Return the readers of each teacher rank's buffers, which are the same in every batch."""
    output, head = (reading_ranks(pieces, sides.teacher.size) for pieces in _plan_pieces(sides, payload))

    def readers(rank: int) -> Readers:
        on_node, head_on_node = (
            tuple(reader for reader in readers[rank] if not sides.crosses(reader, rank)) for readers in (output, head)
        )
        return Readers(on_node, head_on_node, sends_head=len(head_on_node) < len(head[rank]))

    return tuple(map(readers, range(sides.teacher.size)))


def planned_traffic(sides: LayoutPair, payload: Payload) -> tuple[Traffic, ...]:
    """Return the bytes that each student rank receives from other nodes, for a full batch and for the head."""

    def num_bytes(rank: int, pieces: Sequence[BufferSlice], cell_bytes: int) -> int:
        return sum(_num_cells(piece) for piece in pieces if sides.crosses(rank, piece.rank)) * cell_bytes

    column_bytes = (payload.hidden_size or 0) * payload.itemsize
    return tuple(
        Traffic(num_bytes(rank, output, payload.itemsize), num_bytes(rank, head, column_bytes))
        for rank, (output, head) in enumerate(zip(*_plan_pieces(sides, payload), strict=True))
    )


def check_stays_on_node(teacher: str, sides: LayoutPair, payload: Payload) -> None:
    """Raise ConfigError, naming the ranks, their nodes and the bytes, if logits would be sent between nodes.

    Logits are too large for a network; hidden states are not.
    """
    if payload.hidden_size is not None:
        return
    crossing = list(_crossings(sides, payload))
    if not crossing:
        return
    examples = "; ".join(crossing[:3]) + (f"; and {len(crossing) - 3} more" if len(crossing) > 3 else "")
    raise ConfigError(
        f"handoff.type=logits stays on a node, but with dp={sides.student.dp}, cp={sides.student.cp}, "
        f"tp={sides.student.tp} for the student and dp={sides.teacher.dp}, cp={sides.teacher.cp}, "
        f"tp={sides.teacher.tp} for teacher {teacher!r}, in each batch {examples}; write "
        "handoff.type=hidden_states, which are sent between nodes, or cluster.placement=colocated with the same "
        f"parallelism.tp and parallelism.cp for the student and teacher {teacher!r}, where tp · cp divides the ranks "
        "of a node"
    )


def _crossings(sides: LayoutPair, payload: Payload) -> Iterator[str]:
    output, _ = _plan_pieces(sides, payload)
    for rank, pieces in enumerate(output):
        num_bytes: Counter[int] = Counter()
        for piece in pieces:
            if sides.crosses(rank, piece.rank):
                num_bytes[piece.rank] += _num_cells(piece) * payload.itemsize
        for teacher_rank, size in sorted(num_bytes.items()):
            yield (
                f"student rank {rank} on node {sides.student_places[rank].node} reads {size / _GIB:.2f} GiB of teacher "
                f"rank {teacher_rank} on node {sides.teacher_places[teacher_rank].node}"
            )


def _plan_pieces(sides: LayoutPair, payload: Payload) -> tuple[list[list[BufferSlice]], list[list[BufferSlice]]]:
    """Return each student rank's pieces of a full batch's output, and of the head.

    The pairs of ranks that they connect do not depend on the batch size.
    """
    teacher = sides.teacher
    unit = lcm(sides.student.dp, teacher.dp)
    lengths = [payload.length] * (-(-payload.num_sequences // unit) * unit)
    columns = vocabulary_columns(payload.vocab_size, teacher.tp)
    if payload.hidden_size is None:
        no_heads: list[list[BufferSlice]] = [[] for _ in range(sides.student.size)]
        return output_pieces(sides, output_shards(teacher, lengths, columns), lengths), no_heads
    shards = output_shards(teacher, lengths, [range(payload.hidden_size)] * teacher.tp)
    return output_pieces(sides, shards, lengths), head_pieces(sides, columns)


def _num_cells(piece: BufferSlice) -> int:
    return len(piece.window_rows) * len(piece.columns)
