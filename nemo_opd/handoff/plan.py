"""Which rows of which teacher ranks' buffers make up a student rank's window: pure, no I/O and no torch.

A teacher's output has a row for each token of the global batch, sequence after sequence, and columns. Each of its ranks
holds some columns of the tokens of some sequences; a student rank's window has all columns of those of its sequences.
The head is planned as an output of one row, which every data- and context-parallel rank has.
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
class Sides:
    """Layouts of the student and of one teacher, and the places of their ranks."""

    student: Layout
    teacher: Layout
    student_places: tuple[Place, ...]
    teacher_places: tuple[Place, ...]

    def __post_init__(self) -> None:
        sizes = (self.student.size, self.teacher.size)
        if sizes != (len(self.student_places), len(self.teacher_places)):
            raise ConfigError(
                f"layouts of {sizes[0]} student and {sizes[1]} teacher ranks with {len(self.student_places)} and "
                f"{len(self.teacher_places)} places; give each rank one"
            )

    def crosses(self, student_rank: int, teacher_rank: int) -> bool:
        """Return whether the ranks are on different nodes."""
        return self.student_places[student_rank].node != self.teacher_places[teacher_rank].node


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of a teacher's output that one of its ranks holds."""

    rank: int
    rows: range
    """Rows of the output."""
    columns: range
    """Columns of the vocabulary, or of the hidden states."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows that a student rank reads from one teacher rank's buffer, with all columns of the buffer."""

    rank: int
    """Rank of the teacher."""
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
    """True where the head is also sent to ranks on other nodes."""


ONE_READER = Readers()
"""The only reader is receiver 0."""


def output_shards(teacher: Layout, lengths: Sequence[int], columns: Sequence[range]) -> list[Shard]:
    """Return each teacher rank's shard of a batch's output; lengths: of its sequences; columns: by tp index.

    Raises ConfigError where the sequences cannot be cut into dp equal parts.
    """
    parts = _equal_parts(lengths, teacher.dp)
    shards = []
    for rank in range(teacher.size):
        d, _, t = teacher.coordinates(rank)
        shards.append(Shard(rank, parts[d], columns[t]))
    return shards


def output_pieces(sides: Sides, shards: Sequence[Shard], lengths: Sequence[int]) -> list[list[Piece]]:
    """Return the pieces of each student rank's window, in the order of rows, then columns.

    Raises ConfigError where the sequences cannot be cut into dp equal parts.
    """
    parts = _equal_parts(lengths, sides.student.dp)
    windows = [parts[sides.student.coordinates(rank)[0]] for rank in range(sides.student.size)]
    return _pieces(sides, shards, windows)


def head_pieces(sides: Sides, columns: Sequence[range]) -> list[list[Piece]]:
    """Return the head shards that each student rank reads, in the order of columns; columns: by tensor-parallel index.

    A shard is one row, and is always read whole.
    """
    teacher = sides.teacher
    shards = [Shard(rank, range(1), columns[teacher.coordinates(rank)[2]]) for rank in range(teacher.size)]
    return _pieces(sides, shards, [range(1)] * sides.student.size)


def _pieces(sides: Sides, shards: Sequence[Shard], windows: Sequence[range]) -> list[list[Piece]]:
    """Return the pieces of each student rank's window, which are read from the nearest replica of each shard.

    Shards have disjoint rows or the same. Takes time in proportion to the ranks and the pieces.
    """
    # Hidden states are replicated over tp and cp, logits over cp, a head's shard over dp and cp.
    ranks: dict[tuple[range, range], list[int]] = defaultdict(list)
    for shard in shards:
        if shard.columns:
            ranks[shard.rows, shard.columns].append(shard.rank)
    in_order = sorted(ranks, key=lambda key: (key[0].start, key[0].stop, key[1].start))
    replicas = [_Replicas.of(ranks[key], sides.teacher_places) for key in in_order]
    ends = [rows.stop for rows, _ in in_order]
    pieces: list[list[Piece]] = []
    for student_rank, window in enumerate(windows):
        pieces.append([])
        for i in range(bisect_right(ends, window.start), len(in_order)):
            rows, columns = in_order[i]
            if rows.start >= window.stop:
                break
            shared = overlap(rows, window)
            rank = replicas[i].nearest(student_rank, sides.student_places[student_rank])
            pieces[-1].append(Piece(rank, _shifted(shared, -rows.start), _shifted(shared, -window.start), columns))
    return pieces


@dataclass(frozen=True, slots=True)
class _Replicas:
    """Ranks of the teacher that hold the same shard, by place."""

    ranks: tuple[int, ...]
    by_device: dict[Place, int]
    """Lowest rank on each device."""
    by_node: dict[int, int]
    """Lowest rank on each node."""

    @staticmethod
    def of(ranks: Sequence[int], places: Sequence[Place]) -> _Replicas:
        falling = sorted(ranks, reverse=True)
        return _Replicas(
            tuple(reversed(falling)),
            {places[rank]: rank for rank in falling},
            {places[rank].node: rank for rank in falling},
        )

    def nearest(self, student_rank: int, place: Place) -> int:
        """Return the replica on the same device, else the one with the lowest rank on the same node.

        For replicas on other nodes the student's ranks take turns, so that they do not all load one rank's network.
        """
        on_node = self.by_device.get(place, self.by_node.get(place.node))
        return self.ranks[student_rank % len(self.ranks)] if on_node is None else on_node


def reading_ranks(pieces: Sequence[Sequence[Piece]], num_teacher_ranks: int) -> list[tuple[int, ...]]:
    """Return, by teacher rank, the student ranks that have a piece of its buffer."""
    readers: list[dict[int, None]] = [{} for _ in range(num_teacher_ranks)]
    for student_rank, own in enumerate(pieces):
        for piece in own:
            readers[piece.rank][student_rank] = None
    return [tuple(each) for each in readers]


def overlap(one: range, other: range) -> range:
    """Return the numbers in both ranges."""
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _shifted(numbers: range, by: int) -> range:
    """Return the range with `by` added to each number."""
    return range(numbers.start + by, numbers.stop + by)


def _equal_parts(lengths: Sequence[int], dp: int) -> list[range]:
    """Return the rows of each equal part of the padded global batch. Raises ConfigError where parts would differ."""
    if len(lengths) % dp:
        raise ConfigError(
            f"a global batch of {len(lengths)} sequences cannot be cut into dp={dp} equal parts; pad it to a multiple "
            "of the dp of the student and of every teacher"
        )
    ends = list(accumulate(lengths, initial=0))[:: len(lengths) // dp]
    return [range(start, stop) for start, stop in pairwise(ends)]


def vocabulary_columns(vocab_size: int, tp: int) -> list[range]:
    """Return the columns of each tensor-parallel rank, whose shard of the head is a chunk of DTensor's `Shard(0)`.

    The last shards may be smaller or empty.
    """
    chunk = -(-vocab_size // tp)
    bounds = (min(bound, vocab_size) for bound in accumulate([chunk] * tp, initial=0))
    return [range(begin, end) for begin, end in pairwise(bounds)]


def within_vocabulary(columns: range, vocab_size: int) -> range:
    """Return the columns without those beyond the tokenizer's vocabulary, which a padded head has."""
    return range(vocab_size)[columns.start : columns.stop]
