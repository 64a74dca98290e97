"""A plan checked cell by cell, against buffers that hold the name of every cell: no ranges, no intersections."""

from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

from hypothesis import strategies as st

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.plan import Piece, Shard, Sides

Cell = tuple[int, int]
Buffer = dict[Cell, Cell]
"""Row and column of the buffer → of the global batch."""


@dataclass(frozen=True)
class Case:
    sides: Sides
    num_rows: int
    columns: list[range]
    """By tensor-parallel index."""

    @property
    def num_columns(self) -> int:
        return max(each.stop for each in self.columns)

    def shards(self) -> list[Shard]:
        teacher, size = self.sides.teacher, self.num_rows // self.sides.teacher.dp
        coordinates = [teacher.coordinates(rank) for rank in range(teacher.size)]
        return [
            Shard(rank, range(d * size, (d + 1) * size), self.columns[t]) for rank, (d, _, t) in enumerate(coordinates)
        ]

    def buffer(self, rank: int) -> Buffer:
        d, _, t = self.sides.teacher.coordinates(rank)
        size = self.num_rows // self.sides.teacher.dp
        return {
            (i, k): (d * size + i, self.columns[t][k]) for i, k in product(range(size), range(len(self.columns[t])))
        }


@st.composite
def cases(draw: st.DrawFn, *, replicated: bool) -> Case:
    """replicated: every tensor-parallel rank has all columns, as with hidden states."""
    student, teacher = draw(layouts()), draw(layouts())
    places = st.builds(Place, st.integers(0, 1), st.integers(0, 2))
    sides = Sides(
        student,
        teacher,
        tuple(draw(st.lists(places, min_size=student.size, max_size=student.size))),
        tuple(draw(st.lists(places, min_size=teacher.size, max_size=teacher.size))),
    )
    num_rows = lcm(student.dp, teacher.dp) * draw(st.integers(1, 2))
    if replicated:
        return Case(sides, num_rows, [range(2)] * teacher.tp)
    bounds = [0, *sorted(draw(st.lists(st.integers(0, 4), min_size=teacher.tp - 1, max_size=teacher.tp - 1))), 4]
    return Case(sides, num_rows, [range(*pair) for pair in pairwise(bounds)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])))


def check(case: Case, by_student: list[list[Piece]]) -> None:
    """Every cell that some teacher rank has is read once, from the right place, of the nearest that has it."""
    sides = case.sides
    buffers = [case.buffer(rank) for rank in range(sides.teacher.size)]
    size = case.num_rows // sides.student.dp
    assert len(by_student) == sides.student.size
    for student_rank, pieces in enumerate(by_student):
        first = sides.student.coordinates(student_rank)[0] * size
        own_rows = range(first, first + size)
        expected = {cell for buffer in buffers for cell in buffer.values() if cell[0] in own_rows}
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


def nearest(sides: Sides, student_rank: int, holders: list[int]) -> list[int]:
    """The lowest rank of the nearest; any where all are on other nodes."""
    by_distance = {each: [rank for rank in holders if distance(sides, student_rank, rank) == each] for each in range(3)}
    return by_distance[0][:1] or by_distance[1][:1] or by_distance[2]


def distance(sides: Sides, student_rank: int, teacher_rank: int) -> int:
    ours, theirs = sides.student_places[student_rank], sides.teacher_places[teacher_rank]
    return 0 if ours == theirs else 1 if ours.node == theirs.node else 2
