"""Whether every student rank can reach what it reads, and what of it crosses nodes: asked before anything loads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import lcm

from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.plan import (
    Piece,
    Readers,
    Sides,
    head_pieces,
    output_blocks,
    output_pieces,
    reading_ranks,
)
from nemo_opd.handoff.shards import chunk_sizes, contiguous, vocabulary_columns

GIB = 2**30


@dataclass(frozen=True, slots=True)
class Payload:
    """The most that a teacher hands over for a batch."""

    num_rows: int
    """Of the global batch."""
    length: int
    """Tokens of a row."""
    vocab_size: int
    hidden_size: int | None
    """None: logits are handed over."""
    itemsize: int
    """Bytes of a number."""
    head_rows: int | None = None
    """Of a head that is padded beyond the vocabulary; None: it is not."""
    cut_positions: bool = False
    """Whether a context-parallel rank hands its own positions over; if not, each of them hands all over."""

    @property
    def num_columns(self) -> int:
        """Of the output."""
        return self.vocab_size if self.hidden_size is None else self.hidden_size


@dataclass(frozen=True, slots=True)
class Windows:
    """What every student rank reads."""

    output: tuple[tuple[Piece, ...], ...]
    head: tuple[tuple[Piece, ...], ...]
    """Empty where logits are handed over."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that one rank of the student, or all of them, read from teachers on other nodes."""

    output: int = 0
    """In each batch."""
    head: int = 0
    """Once in a run."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.output + other.output, self.head + other.head)

    def __bool__(self) -> bool:
        return bool(self.output or self.head)


def planned(sides: Sides, payload: Payload) -> Windows:
    """The windows of a full batch; which ranks read from which does not depend on its size."""
    teacher = sides.teacher
    unit = lcm(sides.student.dp, teacher.dp)
    num_rows = -(-payload.num_rows // unit) * unit
    head_rows = payload.vocab_size if payload.head_rows is None else payload.head_rows
    columns = vocabulary_columns(chunk_sizes(head_rows, teacher.tp), payload.vocab_size)
    of_output = columns if payload.hidden_size is None else (range(payload.hidden_size),) * teacher.tp
    whole = ((range(payload.length),),) * teacher.cp
    # A position for every rank at least: otherwise it would seem that nobody reads the last ones.
    cut = contiguous(-(-payload.length // teacher.cp) * teacher.cp, teacher.cp)
    blocks = output_blocks(teacher, num_rows, cut if payload.cut_positions else whole, of_output)
    heads: tuple[tuple[Piece, ...], ...] = ((),) * sides.student.size
    if payload.hidden_size is not None:
        heads = head_pieces(sides, columns)
    return Windows(output_pieces(sides, blocks, num_rows, payload.num_columns), heads)


def planned_readers(sides: Sides, payload: Payload) -> tuple[Readers, ...]:
    """By teacher rank: who will map its buffers, in every batch; who is on another node does not."""
    windows = planned(sides, payload)
    output, head = (reading_ranks(each, sides.teacher.size) for each in (windows.output, windows.head))

    def readers(rank: int) -> Readers:
        near, near_head = (
            tuple(reader for reader in readers[rank] if not sides.crosses(reader, rank)) for readers in (output, head)
        )
        return Readers(near, near_head, sends_head=len(near_head) < len(head[rank]))

    return tuple(map(readers, range(sides.teacher.size)))


def planned_traffic(sides: Sides, payload: Payload) -> tuple[Traffic, ...]:
    """By student rank: what of a full batch, and of the head, is sent to it from other nodes."""
    windows = planned(sides, payload)

    def num_bytes(rank: int, pieces: Sequence[Piece], row_bytes: int) -> int:
        return sum(piece.target.num_cells for piece in pieces if sides.crosses(rank, piece.rank)) * row_bytes

    head_row = (payload.hidden_size or 0) * payload.itemsize
    return tuple(
        Traffic(num_bytes(rank, output, payload.itemsize), num_bytes(rank, head, head_row))
        for rank, (output, head) in enumerate(zip(windows.output, windows.head, strict=True))
    )


def check_reach(transport: str, teacher: str, sides: Sides, payload: Payload) -> None:
    """Raises ConfigError where logits would cross nodes, which is too much for a network.

    Hidden states may: what `transport` cannot map is sent. The message has the ranks, their nodes, the bytes, and the
    nearest layout of the same ranks that would work.
    """
    if payload.hidden_size is not None:
        return
    crossing = list(_crossings(sides, payload))
    if not crossing:
        return
    shown = "; ".join(crossing[:3]) + (f"; and {len(crossing) - 3} more" if len(crossing) > 3 else "")
    raise ConfigError(
        f"handoff.type=logits by {transport} stays on a node, but with dp={sides.student.dp}, cp={sides.student.cp}, "
        f"tp={sides.student.tp} for the student and dp={sides.teacher.dp}, cp={sides.teacher.cp}, "
        f"tp={sides.teacher.tp} for teacher {teacher!r}, {shown} in each batch; write handoff.type=hidden_states, "
        f"which are sent between nodes, or {_advice(teacher, sides, payload)}"
    )


def _crossings(sides: Sides, payload: Payload) -> Iterator[str]:
    windows = planned(sides, payload)
    for rank, (output, head) in enumerate(zip(windows.output, windows.head, strict=True)):
        here = sides.student_places[rank].node
        for teacher_rank, size in sorted(_bytes_by_rank(output, head, payload).items()):
            there = sides.teacher_places[teacher_rank].node
            if there != here:
                yield (
                    f"student rank {rank} on node {here} reads {size / GIB:.2f} GiB of teacher rank {teacher_rank} on "
                    f"node {there}"
                )


def _bytes_by_rank(output: Sequence[Piece], head: Sequence[Piece], payload: Payload) -> Counter[int]:
    num_bytes: Counter[int] = Counter()
    for piece in output:
        num_bytes[piece.rank] += piece.target.num_cells * payload.itemsize
    for piece in head:
        num_bytes[piece.rank] += piece.target.num_cells * (payload.hidden_size or 0) * payload.itemsize
    return num_bytes


def _advice(teacher: str, sides: Sides, payload: Payload) -> str:
    for other in _alternatives(sides):
        if _stays_on_node(other, payload):
            what = f"give teacher {teacher!r} parallelism.tp={other.teacher.tp} and parallelism.cp={other.teacher.cp}"
            if other.student != sides.student:
                what += (
                    f" and the student student.parallelism.tp={other.student.tp} and "
                    f"student.parallelism.cp={other.student.cp}"
                )
            return f"{what}, with which every window stays on its node"
    return (
        "put the teacher's ranks on the student's nodes (cluster.placement=colocated): no other layout of these ranks "
        "keeps every window on its node"
    )


def _alternatives(sides: Sides) -> Iterator[Sides]:
    """The nearest to what was asked for first: the teacher laid out otherwise, both alike, and then with another cp."""
    of_teacher, of_both = _by_nearness(sides.teacher), _by_nearness(sides.student)
    for is_cp_kept in (True, False):
        for teacher in of_teacher:
            if (teacher.cp == sides.teacher.cp) == is_cp_kept:
                yield replace(sides, teacher=teacher)
        for both in of_both if sides.student.size == sides.teacher.size else ():
            if (both.cp == sides.student.cp) == is_cp_kept:
                yield replace(sides, student=both, teacher=both)


def _by_nearness(asked: Layout) -> list[Layout]:
    """All layouts of as many ranks; first those that cut a model into as many parts, which need as much memory."""

    def change(layout: Layout) -> tuple[int, int]:
        return abs(layout.cp * layout.tp - asked.cp * asked.tp), abs(layout.tp - asked.tp)

    size = asked.size
    divisors = [number for number in range(1, size + 1) if size % number == 0]
    layouts = [Layout.of(size, cp, tp) for tp in divisors for cp in divisors if size % (cp * tp) == 0]
    return sorted(layouts, key=change)


def _stays_on_node(sides: Sides, payload: Payload) -> bool:
    windows = planned(sides, payload)
    return all(
        sides.distance(rank, piece.rank) < 2
        for rank in range(sides.student.size)
        for piece in (*windows.output[rank], *windows.head[rank])
    )
