"""Pure planning, without I/O or torch, of the rows of teacher ranks' buffers that make up a student rank's window.

A teacher's output has a row for each token of the global batch, sequence after sequence. Each teacher rank holds a
range of columns for the tokens of some sequences; a student rank's window has all columns for the tokens of its own
sequences. The head is planned as an output of one row, which every data- and context-parallel rank holds.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayoutPair:
    """Layouts of the student and of one teacher, and the places of their ranks."""

    student: Layout
    teacher: Layout
    student_places: tuple[Place, ...]
    teacher_places: tuple[Place, ...]

    def __post_init__(self) -> None:
        sizes = (self.student.size, self.teacher.size)
        if sizes != (len(self.student_places), len(self.teacher_places)):
            raise ConfigError(
                f"the layouts have {sizes[0]} student and {sizes[1]} teacher ranks, but there are "
                f"{len(self.student_places)} and {len(self.teacher_places)} places; give each rank one place"
            )

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


def output_shards(teacher: Layout, lengths: Sequence[int], columns: Sequence[range]) -> list[BufferShard]:
    """Return each teacher rank's shard of a batch's output.

    lengths: tokens of each sequence. columns: range of each tensor-parallel index. Raises ConfigError if the sequences
    cannot be split into dp equal parts.
    """
    parts = _equal_parts(lengths, teacher.dp)
    shards = []
    for rank in range(teacher.size):
        d, _, t = teacher.coordinates(rank)
        shards.append(BufferShard(rank, parts[d], columns[t]))
    return shards


def output_pieces(sides: LayoutPair, shards: Sequence[BufferShard], lengths: Sequence[int]) -> list[list[BufferSlice]]:
    """Return the pieces of each student rank's window, ordered by row, then column.

    Raises ConfigError if the sequences cannot be split into dp equal parts.
    """
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
    """Return the range moved by `by`."""
    return range(numbers.start + by, numbers.stop + by)


def _equal_parts(lengths: Sequence[int], dp: int) -> list[range]:
    """Return the rows of each equal part of the padded global batch. Raises ConfigError if parts would differ."""
    if len(lengths) % dp:
        raise ConfigError(
            f"a global batch of {len(lengths)} sequences cannot be split into dp={dp} equal parts; pad it to a "
            "multiple of the dp of the student and of every teacher"
        )
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
