"""Which cells of which teacher ranks' buffers make up a student rank's window: pure, no I/O and no torch.

A cell is (row of the global batch, position, column). A window is a student rank's rows with all positions and all
columns. The head is planned as an output of one row and one position, which every data- and context-parallel rank has.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.errors import ConfigError
from nemo_opd.handoff.shards import Ranges, equal_parts


@dataclass(frozen=True, slots=True)
class Sides:
    """The student and one teacher, and where the ranks of each are."""

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

    def distance(self, student_rank: int, teacher_rank: int) -> int:
        """0: one device; 1: one node; 2: over the network."""
        ours, theirs = self.student_places[student_rank], self.teacher_places[teacher_rank]
        if ours.node != theirs.node:
            return 2
        return 0 if ours.device == theirs.device else 1

    def crosses(self, student_rank: int, teacher_rank: int) -> bool:
        """Whether they are on different nodes."""
        return self.distance(student_rank, teacher_rank) == 2

    def nearest(self, student_rank: int, replicas: Sequence[Block]) -> Block:
        """Of blocks with the same content: on the own device, else the lowest rank of the own node.

        From other nodes ranks of the student take turns, so that not all of them load one rank's network.
        """
        least = min(self.distance(student_rank, block.rank) for block in replicas)
        near = sorted((b for b in replicas if self.distance(student_rank, b.rank) == least), key=lambda b: b.rank)
        return near[student_rank % len(near)] if least == 2 else near[0]


def colocated(student: Layout, teacher: Layout, ranks_per_node: int) -> Sides:
    """Both on the same devices, rank by rank, nodes filled one after another."""
    return Sides(student, teacher, *(filled(layout.size, ranks_per_node) for layout in (student, teacher)))


def filled(num_ranks: int, ranks_per_node: int, first: int = 0) -> tuple[Place, ...]:
    """Places of consecutive ranks, one a device, from the `first` device of the cluster on."""
    return tuple(Place(*divmod(device, ranks_per_node)) for device in range(first, first + num_ranks))


@dataclass(frozen=True, slots=True)
class Box:
    """Cells: rows × positions × columns."""

    rows: range
    positions: range
    columns: range

    @property
    def num_cells(self) -> int:
        return len(self.rows) * len(self.positions) * len(self.columns)

    @property
    def slices(self) -> tuple[slice, slice, slice]:
        """To index a tensor with."""
        return _slice(self.rows), _slice(self.positions), _slice(self.columns)

    def meet(self, other: Box) -> Box:
        """The cells of both; maybe none."""
        return Box(
            overlap(self.rows, other.rows),
            overlap(self.positions, other.positions),
            overlap(self.columns, other.columns),
        )

    @property
    def at_origin(self) -> Box:
        """Where the cells are in a copy that has no others."""
        return self.shifted(-self.rows.start, -self.positions.start, -self.columns.start)

    def shifted(self, rows: int, positions: int, columns: int) -> Box:
        return Box(_shifted(self.rows, rows), _shifted(self.positions, positions), _shifted(self.columns, columns))


def overlap(one: range, other: range) -> range:
    start = max(one.start, other.start)
    return range(start, max(start, min(one.stop, other.stop)))


def _slice(numbers: range) -> slice:
    return slice(numbers.start, numbers.stop)


def _shifted(numbers: range, by: int) -> range:
    return range(numbers.start + by, numbers.stop + by)


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a teacher rank's buffer."""

    rank: int
    first_row: int
    """Of the buffer."""
    rows: range
    """Of the global batch."""
    positions: Ranges
    """One range after another in the buffer, from its first position on."""
    columns: range
    """Of the vocabulary (or all of the hidden width); the buffer has no others."""

    def boxes(self) -> Iterator[tuple[Box, tuple[int, int, int]]]:
        """The cells that it has, a range of positions at a time, and by how much they are shifted in the buffer."""
        before = 0
        for positions in self.positions:
            shift = self.first_row - self.rows.start, before - positions.start, -self.columns.start
            yield Box(self.rows, positions, self.columns), shift
            before += len(positions)


@dataclass(frozen=True, slots=True)
class Piece:
    """Cells that a student rank reads from one buffer."""

    rank: int
    """The teacher's, whose buffer it is."""
    source: Box
    """Where they are in the buffer."""
    target: Box
    """Where they belong in the window."""


@dataclass(frozen=True, slots=True)
class Readers:
    """The student ranks that map a teacher rank's buffers."""

    output: tuple[int, ...] = (0,)
    """Hidden states or logits."""
    head: tuple[int, ...] = (0,)
    sends_head: bool = False
    """The head is also sent to ranks on other nodes."""


ONE_READER = Readers()
"""Every teacher rank has a student rank of its own, with a receiver of its own."""


def output_blocks(
    teacher: Layout, num_rows: int, positions: Sequence[Ranges], columns: Sequence[range]
) -> tuple[Block, ...]:
    """What each rank has of a batch: positions by context-parallel, columns by tensor-parallel rank.

    Hidden states are planned with the same columns for every one, the hidden width. Raises ConfigError where the rows
    cannot be cut into dp equal parts.
    """
    parts = equal_parts(num_rows, teacher.dp)
    blocks = []
    for rank in range(teacher.size):
        d, c, t = teacher.coordinates(rank)
        blocks.append(Block(rank, 0, parts[d], positions[c], columns[t]))
    return tuple(blocks)


def head_blocks(teacher: Layout, columns: Sequence[range]) -> tuple[Block, ...]:
    """What each rank has of the head: the columns of its place along tensor parallelism."""
    return tuple(
        Block(rank, 0, range(1), (range(1),), columns[teacher.coordinates(rank)[2]]) for rank in range(teacher.size)
    )


def output_pieces(
    sides: Sides, blocks: Sequence[Block], num_rows: int, num_columns: int
) -> tuple[tuple[Piece, ...], ...]:
    """By student rank: the pieces of its window, in the order of rows, positions, columns.

    Cells that no block has (padding behind a part's longest sequence) are in no piece. Raises ConfigError where the
    rows cannot be cut into dp equal parts.
    """
    parts = equal_parts(num_rows, sides.student.dp)
    width = max((positions.stop for block in blocks for positions in block.positions), default=0)
    copies = replicas(blocks)
    return tuple(
        _pieces(sides, rank, copies, Box(parts[sides.student.coordinates(rank)[0]], range(width), range(num_columns)))
        for rank in range(sides.student.size)
    )


def head_pieces(sides: Sides, columns: Sequence[range]) -> tuple[tuple[Piece, ...], ...]:
    """By student rank: whose shards of the head it reads, in the order of columns; all of each."""
    window = Box(range(1), range(1), range(max(each.stop for each in columns)))
    copies = replicas(head_blocks(sides.teacher, columns))
    return tuple(_pieces(sides, rank, copies, window) for rank in range(sides.student.size))


def replicas(blocks: Sequence[Block]) -> tuple[tuple[Block, ...], ...]:
    """Blocks with the same cells, by what they hold: hidden states over tp (and cp), a head's shard over dp and cp."""
    groups: dict[tuple[range, Ranges, range], list[Block]] = defaultdict(list)
    for block in blocks:
        groups[block.rows, block.positions, block.columns].append(block)
    return tuple(map(tuple, groups.values()))


def _pieces(sides: Sides, student_rank: int, copies: Sequence[Sequence[Block]], window: Box) -> tuple[Piece, ...]:
    pieces: list[Piece] = []
    for same in copies:
        if overlap(same[0].rows, window.rows):
            block = sides.nearest(student_rank, same)
            pieces.extend(_in_window(block, window))
    return tuple(sorted(pieces, key=lambda piece: tuple(where.start for where in piece.target.slices)))


def _in_window(block: Block, window: Box) -> Iterator[Piece]:
    for box, shift in block.boxes():
        cells = box.meet(window)
        if cells.num_cells:
            yield Piece(block.rank, cells.shifted(*shift), cells.shifted(-window.rows.start, 0, 0))


def reading_ranks(by_student: Sequence[Sequence[Piece]], num_teacher_ranks: int) -> tuple[tuple[int, ...], ...]:
    """By teacher rank: the student ranks that have a piece of its buffer."""
    ranks: list[list[int]] = [[] for _ in range(num_teacher_ranks)]
    for student_rank, pieces in enumerate(by_student):
        for rank in sorted({piece.rank for piece in pieces}):
            ranks[rank].append(student_rank)
    return tuple(map(tuple, ranks))
