"""A plan checked cell by cell, against buffers that hold the name of every cell: no ranges, no intersections."""

from dataclasses import dataclass
from itertools import pairwise, product
from math import lcm

from hypothesis import strategies as st

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.plan import Block, Piece, Sides

Cell = tuple[int, int, int]
Buffer = dict[Cell, Cell]
"""Row, position and column of the buffer → of the global batch."""


@dataclass(frozen=True)
class Case:
    sides: Sides
    num_rows: int
    positions: list[list[tuple[range, ...]]]
    """By data- and context-parallel index."""
    columns: list[range]
    """By tensor-parallel index."""

    @property
    def num_columns(self) -> int:
        return max(each.stop for each in self.columns)

    def blocks(self) -> list[Block]:
        teacher, size = self.sides.teacher, self.num_rows // self.sides.teacher.dp
        result = []
        for rank in range(teacher.size):
            d, c, t = teacher.coordinates(rank)
            rows = range(d * size, (d + 1) * size)
            result.append(Block(rank, 0, rows, self.positions[d][c], self.columns[t]))
        return result

    def buffer(self, rank: int) -> Buffer:
        d, c, t = self.sides.teacher.coordinates(rank)
        size = self.num_rows // self.sides.teacher.dp
        positions = [position for each in self.positions[d][c] for position in each]
        return {
            (i, j, k): (d * size + i, positions[j], self.columns[t][k])
            for i, j, k in product(range(size), range(len(positions)), range(len(self.columns[t])))
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
    positions = [draw(cut(draw(st.integers(1, 6)), teacher.cp)) for _ in range(teacher.dp)]
    if replicated:
        return Case(sides, num_rows, positions, [range(2)] * teacher.tp)
    bounds = [0, *sorted(draw(st.lists(st.integers(0, 4), min_size=teacher.tp - 1, max_size=teacher.tp - 1))), 4]
    return Case(sides, num_rows, positions, [range(*pair) for pair in pairwise(bounds)])


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    return Layout(draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2])))


@st.composite
def cut(draw: st.DrawFn, length: int, cp: int) -> list[tuple[range, ...]]:
    """Positions dealt out in runs, in any order: contiguous and head-tail are among them."""
    bounds = sorted({0, length, *draw(st.lists(st.integers(0, length), max_size=4))})
    runs = [range(*pair) for pair in pairwise(bounds)]
    owners = draw(st.lists(st.integers(0, cp - 1), min_size=len(runs), max_size=len(runs)))
    return [tuple(run for run, owner in zip(runs, owners, strict=True) if owner == c) for c in range(cp)]


def check(case: Case, by_student: tuple[tuple[Piece, ...], ...]) -> None:
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
            for source, target in zip(cells(piece.source), cells(piece.target), strict=True):
                cell = (target[0] + first, target[1], target[2])
                assert buffers[piece.rank][source] == cell
                read.append(cell)
                holders = [rank for rank, buffer in enumerate(buffers) if cell in buffer.values()]
                assert piece.rank in nearest(sides, student_rank, holders)
        assert len(read) == len(set(read))
        assert set(read) == expected


def cells(box) -> list[Cell]:
    return list(product(box.rows, box.positions, box.columns))


def nearest(sides: Sides, student_rank: int, holders: list[int]) -> list[int]:
    """The lowest rank of the nearest; any where all are on other nodes."""
    by_distance = {each: [rank for rank in holders if distance(sides, student_rank, rank) == each] for each in range(3)}
    return by_distance[0][:1] or by_distance[1][:1] or by_distance[2]


def distance(sides: Sides, student_rank: int, teacher_rank: int) -> int:
    ours, theirs = sides.student_places[student_rank], sides.teacher_places[teacher_rank]
    return 0 if ours == theirs else 1 if ours.node == theirs.node else 2
