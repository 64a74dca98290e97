"""Pure planning, without I/O or torch, of the rows of teacher ranks' buffers that make up a student rank's window.

A teacher's output has a row for each token of the global batch, sequence after sequence. Each teacher rank holds a
range of columns for the tokens of some sequences; a student rank's window has all columns for the tokens of its own
sequences. The head is planned as an output of one row, which every data- and context-parallel rank holds. From the same
plan follow who maps a buffer, and what crosses nodes.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import lcm

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.errors import ConfigError

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class LayoutPair:
    """Layouts of the student and of one teacher, and the places of their ranks."""

    student: Layout
    teacher: Layout
    student_places: tuple[Place, ...]
    teacher_places: tuple[Place, ...]

    def crosses(self, student_rank: int, teacher_rank: int) -> bool:
        """Return whether the ranks are on different nodes."""
        return self.student_places[student_rank].node != self.teacher_places[teacher_rank].node


@dataclass(frozen=True, slots=True)
class BufferShard:
    """The part of a teacher's output that one of its ranks holds."""

    rank: int
    rows: range
    """Rows of the output."""
    columns: range
    """Columns of the logits or of the hidden states."""


@dataclass(frozen=True, slots=True)
class BufferSlice:
    """Rows that a student rank reads from one teacher rank's buffer, in all its columns."""

    rank: int
    """Teacher rank."""
    buffer_rows: range
    window_rows: range
    columns: range
    """Columns of the output that the buffer holds."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Student ranks that map a teacher rank's buffers."""

    output: tuple[int, ...] = (0,)
    """Readers of hidden states or logits."""
    head: tuple[int, ...] = (0,)
    sends_head: bool = False
    """Whether the head is also sent to ranks on other nodes."""


ONE_READER = Readers()
"""Readers with receiver 0 only."""


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


def output_shards(teacher: Layout, lengths: Sequence[int], columns: Sequence[range]) -> list[BufferShard]:
    """Return each teacher rank's shard of a batch's output.

    lengths: tokens of each sequence, in number a multiple of dp. columns: range of each tensor-parallel index.
    """
    parts = _equal_parts(lengths, teacher.dp)
    shards = []
    for rank in range(teacher.size):
        d, _, t = teacher.coordinates(rank)
        shards.append(BufferShard(rank, parts[d], columns[t]))
    return shards


def output_pieces(sides: LayoutPair, shards: Sequence[BufferShard], lengths: Sequence[int]) -> list[list[BufferSlice]]:
    """Return the pieces of each student rank's window, ordered by row, then column."""
    parts = _equal_parts(lengths, sides.student.dp)
    windows = [parts[sides.student.coordinates(rank)[0]] for rank in range(sides.student.size)]
    return _pieces(sides, shards, windows)


def head_pieces(sides: LayoutPair, columns: Sequence[range]) -> list[list[BufferSlice]]:
    """Return the head shards that each student rank reads, ordered by column.

    A shard counts as one row. columns: range of each tensor-parallel index.
    """
    teacher = sides.teacher
    shards = [BufferShard(rank, range(1), columns[teacher.coordinates(rank)[2]]) for rank in range(teacher.size)]
    return _pieces(sides, shards, [range(1)] * sides.student.size)


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


def _pieces(sides: LayoutPair, shards: Sequence[BufferShard], windows: Sequence[range]) -> list[list[BufferSlice]]:
    """Return the pieces of each student rank's window, read from the nearest replica of each shard.

    The rows of two shards must be equal or disjoint. Takes time proportional to the ranks and the pieces.
    """
    # Hidden states are replicated over tp and cp, logits over cp, head shards over dp and cp.
    ranks: dict[tuple[range, range], list[int]] = defaultdict(list)
    for shard in shards:
        if shard.columns:
            ranks[shard.rows, shard.columns].append(shard.rank)
    in_order = sorted(ranks, key=lambda key: (key[0].start, key[0].stop, key[1].start))
    replicas = [_Replicas.of(ranks[key], sides.teacher_places) for key in in_order]
    ends = [rows.stop for rows, _ in in_order]
    pieces: list[list[BufferSlice]] = []
    for student_rank, window in enumerate(windows):
        pieces.append([])
        for i in range(bisect_right(ends, window.start), len(in_order)):
            rows, columns = in_order[i]
            if rows.start >= window.stop:
                break
            shared = overlap(rows, window)
            rank = replicas[i].nearest(student_rank, sides.student_places[student_rank])
            pieces[-1].append(
                BufferSlice(rank, _shifted(shared, -rows.start), _shifted(shared, -window.start), columns)
            )
    return pieces


@dataclass(frozen=True, slots=True)
class _Replicas:
    """The teacher ranks that hold the same shard, keyed by place."""

    ranks: tuple[int, ...]
    by_device: dict[Place, int]
    """Lowest rank on each device."""
    by_node: dict[int, int]
    """Lowest rank on each node, keyed by its index."""

    @staticmethod
    def of(ranks: Sequence[int], places: Sequence[Place]) -> _Replicas:
        descending = sorted(ranks, reverse=True)  # so that the lowest rank at a place wins
        return _Replicas(
            tuple(reversed(descending)),
            {places[rank]: rank for rank in descending},
            {places[rank].node: rank for rank in descending},
        )

    def nearest(self, student_rank: int, place: Place) -> int:
        """Return the replica on the same device, else the lowest on the same node, else one on another node.

        Student ranks take turns over replicas on other nodes, so that they do not all load one rank's network.
        """
        nearby = self.by_device.get(place, self.by_node.get(place.node))
        return self.ranks[student_rank % len(self.ranks)] if nearby is None else nearby


def reading_ranks(pieces: Sequence[Sequence[BufferSlice]], num_teacher_ranks: int) -> list[tuple[int, ...]]:
    """Return, for each teacher rank, the student ranks that read a piece of its buffer."""
    readers: list[dict[int, None]] = [{} for _ in range(num_teacher_ranks)]
    for student_rank, rank_pieces in enumerate(pieces):
        for piece in rank_pieces:
            readers[piece.rank][student_rank] = None
    return [tuple(ranks) for ranks in readers]


def overlap(first: range, second: range) -> range:
    """Return the intersection of two ranges."""
    start = max(first.start, second.start)
    return range(start, max(start, min(first.stop, second.stop)))


def _shifted(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)


def _equal_parts(lengths: Sequence[int], dp: int) -> list[range]:
    """Return the rows of each equal part of the padded global batch."""
    assert len(lengths) % dp == 0, "BatchGrid pads the batch"
    ends = list(accumulate(lengths, initial=0))[:: len(lengths) // dp]
    return [range(start, stop) for start, stop in pairwise(ends)]


def vocabulary_columns(vocab_size: int, tp: int) -> list[range]:
    """Return each tensor-parallel rank's columns, as DTensor's `Shard(0)` splits the head.

    The last shards may be smaller or empty.
    """
    chunk = -(-vocab_size // tp)
    bounds = (min(bound, vocab_size) for bound in accumulate([chunk] * tp, initial=0))
    return [range(begin, end) for begin, end in pairwise(bounds)]


def within_vocabulary(columns: range, vocab_size: int) -> range:
    """Drop a padded head's columns beyond the tokenizer's vocabulary."""
    return range(vocab_size)[columns.start : columns.stop]
