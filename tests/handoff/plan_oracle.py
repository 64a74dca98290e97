"""A check of plans cell by cell, with buffers that hold the name of each cell: no ranges, no intersections."""

from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

from hypothesis import strategies as st

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.slices import BufferShard, BufferSlice, LayoutPair

Cell = tuple[int, int]
Buffer = dict[Cell, Cell]
"""Row and column in the global batch, keyed by row and column in the buffer."""


@dataclass(frozen=True)
class Case:
    sides: LayoutPair
    lengths: list[int]
    """Lengths of the sequences of the batch."""
    columns: list[range]
    """Columns of each tensor-parallel index."""

    @property
    def num_columns(self) -> int:
        return max(columns.stop for columns in self.columns)

    def shards(self) -> list[BufferShard]:
        teacher = self.sides.teacher
        shards = []
        for rank in range(teacher.size):
            d, _, t = teacher.coordinates(rank)
            rows = self.rows(d, teacher.dp)
            shards.append(BufferShard(rank, range(rows[0], rows[-1] + 1), self.columns[t]))
        return shards

    def rows(self, part: int, parts: int) -> list[int]:
        """Return the rows of a part's sequences, one per token."""
        sequence_of_row = [sequence for sequence, length in enumerate(self.lengths) for _ in range(length)]
        size = len(self.lengths) // parts
        return [row for row, sequence in enumerate(sequence_of_row) if sequence // size == part]

    def buffer(self, rank: int) -> Buffer:
        d, _, t = self.sides.teacher.coordinates(rank)
        rows = self.rows(d, self.sides.teacher.dp)
        return {
            (i, k): (row, self.columns[t][k]) for (i, row), k in product(enumerate(rows), range(len(self.columns[t])))
        }


@st.composite
def cases(draw: st.DrawFn, *, replicated: bool) -> Case:
    """Draw a case. replicated: every tensor-parallel rank has all columns, as for hidden states."""
    student, teacher = draw(layouts()), draw(layouts())
    places = st.builds(Place, st.integers(0, 1), st.integers(0, 2))
    sides = LayoutPair(
        student,
        teacher,
        tuple(draw(st.lists(places, min_size=student.size, max_size=student.size))),
        tuple(draw(st.lists(places, min_size=teacher.size, max_size=teacher.size))),
    )
    num_sequences = lcm(student.dp, teacher.dp) * draw(st.integers(1, 2))
    lengths = draw(st.lists(st.integers(1, 3), min_size=num_sequences, max_size=num_sequences))
    if replicated:
        return Case(sides, lengths, [range(2)] * teacher.tp)
    bounds = [0, *sorted(draw(st.lists(st.integers(0, 4), min_size=teacher.tp - 1, max_size=teacher.tp - 1))), 4]
    return Case(sides, lengths, [range(*pair) for pair in pairwise(bounds)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])))


def check(case: Case, by_student: list[list[BufferSlice]]) -> None:
    """Assert that each cell is read once, from the right place, of the nearest teacher rank that has it."""
    sides = case.sides
    buffers = [case.buffer(rank) for rank in range(sides.teacher.size)]
    assert len(by_student) == sides.student.size
    for student_rank, pieces in enumerate(by_student):
        student_rows = case.rows(sides.student.coordinates(student_rank)[0], sides.student.dp)
        first = student_rows[0]
        expected = {cell for buffer in buffers for cell in buffer.values() if cell[0] in student_rows}
        read: list[Cell] = []
        for piece in pieces:
            source = product(piece.buffer_rows, range(len(piece.columns)))
            target = product(piece.window_rows, piece.columns)
            for place, (row, column) in zip(source, target, strict=True):
                cell = (row + first, column)
                assert buffers[piece.rank][place] == cell
                read.append(cell)
                holders = [rank for rank, buffer in enumerate(buffers) if cell in buffer.values()]
                assert piece.rank in nearest(sides, student_rank, holders)
        assert len(read) == len(set(read))
        assert set(read) == expected


def nearest(sides: LayoutPair, student_rank: int, holders: list[int]) -> list[int]:
    """Return the lowest rank among the nearest, or all if they are on other nodes."""
    by_distance = {
        steps: [rank for rank in holders if distance(sides, student_rank, rank) == steps] for steps in range(3)
    }
    return by_distance[0][:1] or by_distance[1][:1] or by_distance[2]


def distance(sides: LayoutPair, student_rank: int, teacher_rank: int) -> int:
    ours, theirs = sides.student_places[student_rank], sides.teacher_places[teacher_rank]
    return 0 if ours == theirs else 1 if ours.node == theirs.node else 2
