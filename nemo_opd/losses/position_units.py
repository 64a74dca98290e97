"""Student positions inside of chunks that have a target, and their nodes in the tree of pieces (methods.md §5.7)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.losses.chunk_positions import ChunkPositions, offsets_of
from nemo_opd.losses.piece_tree import PieceTree, TreeOn
from nemo_opd.losses.reduction import ChunkUnits, chunk_units, next_tokens

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@dataclass(frozen=True, slots=True)
class NodePositions:
    """Some of the compared positions, each with a node of the tree."""

    units: ChunkPositions
    """[I], by unit; its rows are a position's places among all that are compared."""
    runs: ChunkPositions
    """[R]: the tree's runs below the node, by position."""
    token_offsets: Sequence[int]
    """[R + 1]: where runs begin among the tokens of all; on the host."""

    @property
    def unit_offsets(self) -> list[int]:
        """[U + 1]: where units begin among these tokens."""
        return [self.token_offsets[self.runs.offsets[begin]] for begin in self.units.offsets]


@dataclass(frozen=True, slots=True)
class PositionUnits:
    """The compared positions of each chunk.

    A chunk's first student token is compared at the teacher's boundary. A later one is inside of the chunk's first
    teacher token y, and compared if the chunk's student tokens before it begin the pieces of y, which has more. In a
    chunk of several teacher tokens, one that may cross the end of y is compared only if it is the chunk's last, which
    has the teacher's chain.
    """

    student: ChunkPositions
    """[P]: all of them; the first of each chunk."""
    inside: NodePositions
    """Positions inside of a teacher token, with the node of the student tokens since it began."""
    before: NodePositions
    """Positions that teacher tokens which began a token earlier reach, with the node of the student tokens since then.
    Left out if the teacher's token before is not a chunk by itself.
    """
    rows_before: ChunkPositions
    """The teacher's row before its first, of units with positions in `before`."""

    @staticmethod
    def of(
        units: ChunkUnits, student_ids: Tensor, teacher_ids: Tensor, tree_on: TreeOn, *, has_before: bool
    ) -> PositionUnits:
        """Find them, as `planned`, by the ids [B, S] and [B, T]. has_before: else `before` has no position."""

        def positions(*tensors: Tensor) -> list[Tensor]:
            return _positions(tree_on(tensors[0].device), *tensors, has_before=has_before)

        fields = (units.student_rows, units.teacher_rows, units.student_lengths, units.teacher_lengths)
        found = planned(positions, *fields, student_ids, teacher_ids)
        return PositionUnits(
            ChunkPositions.sent(*found[:3]),
            _nodes(found[3:10]),
            _nodes(found[10:17]),
            ChunkPositions.sent(*found[17:]),
        )


def count_positions(
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    projection: ProjectionMatrix,
    pieces: str,
) -> Tensor:
    """Count the compared positions of each sequence, from ids and chunk ids [B, S] and [B, T]: int64 [B]."""
    sizes = projection.student_vocab_size, projection.teacher_vocab_size
    units = chunk_units(student_chunk_id, teacher_chunk_id)

    def positions(student_rows: Tensor, *tensors: Tensor) -> list[Tensor]:
        compared = _Compared.of(PieceTree.of(projection, pieces, *sizes, student_rows.device), student_rows, *tensors)
        sequence = student_rows[compared.unit] // student_ids.shape[1]
        return [torch.bincount(sequence[compared.is_compared], minlength=len(student_ids))]

    fields = (units.student_rows, units.teacher_rows, units.student_lengths, units.teacher_lengths)
    return planned(positions, *fields, student_ids, teacher_ids)[0]


@dataclass(frozen=True, slots=True)
class _Compared:
    """All student tokens of the chunks, [R]."""

    chunks: ChunkPositions
    realised: Tensor
    """int64 [R]: token ids."""
    unit: Tensor
    """int64 [R]: each token's chunk."""
    node: Tensor
    """int64 [R]: the tree's node of the tokens since the teacher token began."""
    is_compared: Tensor
    """bool [R]"""

    @staticmethod
    def of(
        tree: PieceTree,
        student_rows: Tensor,
        teacher_rows: Tensor,
        student_lengths: Tensor,
        teacher_lengths: Tensor,
        student_ids: Tensor,
        teacher_ids: Tensor,
    ) -> _Compared:
        chunks = ChunkPositions.of(student_rows, student_lengths)
        realised, place = chunks.targets(student_ids), chunks.place
        unit = chunks.per_position(torch.arange(len(student_rows), device=place.device))
        first = next_tokens(teacher_ids, teacher_rows).long()[unit]
        at = (tree.begin[first] + place).clamp(max=len(tree.pieces) - 1)
        has_piece = place < tree.length[first]
        differs = ~has_piece | (tree.pieces[at] != realised)
        num_different = differs.long().cumsum(0) - differs.long()
        is_like = num_different == num_different[student_lengths.cumsum(0) - student_lengths][unit]
        may_cross = differs & (teacher_lengths[unit] > 1) & (place < student_lengths[unit] - 1)
        is_compared = (place == 0) | (has_piece & is_like & ~may_cross)
        return _Compared(chunks, realised, unit, torch.where(place == 0, 0, tree.node[at]), is_compared)


def _positions(
    tree: PieceTree,
    student_rows: Tensor,
    teacher_rows: Tensor,
    student_lengths: Tensor,
    teacher_lengths: Tensor,
    student_ids: Tensor,
    teacher_ids: Tensor,
    *,
    has_before: bool,
) -> list[Tensor]:
    compared = _Compared.of(
        tree, student_rows, teacher_rows, student_lengths, teacher_lengths, student_ids, teacher_ids
    )
    begins = student_lengths.cumsum(0) - student_lengths
    follows = torch.zeros_like(teacher_lengths, dtype=torch.bool)
    follows[1:] = (student_rows + student_lengths)[:-1] == student_rows[1:]
    follows[1:] &= ((teacher_rows + 1)[:-1] == teacher_rows[1:]) & (teacher_lengths[:-1] == 1)
    before = _nodes_from_before(tree, compared.realised, begins, student_lengths, follows & has_before)
    # At a boundary the realised token alone ends there, which the target has already.
    is_boundary = compared.chunks.place == 0
    before = before.masked_fill(is_boundary & ~tree.has_pieces_below(before.clamp(min=0)), -1)
    unit, node, before = (values[compared.is_compared] for values in (compared.unit, compared.node, before))
    per_unit = torch.bincount(unit, minlength=len(student_rows))
    inside = _at_nodes(tree, node, node > 0, unit, len(student_rows))
    earlier = _at_nodes(tree, before, before >= 0, unit, len(student_rows))
    rows_before = ChunkPositions.of(teacher_rows - 1, earlier[2].clamp(max=1))
    return [*ChunkPositions.of(student_rows, per_unit).tensors, *inside, *earlier, *rows_before.tensors]


def _nodes_from_before(tree: PieceTree, realised: Tensor, begins: Tensor, lengths: Tensor, follows: Tensor) -> Tensor:
    """Return for each token [R] the node of those since the chunk before began, −1 if there is none."""
    most = int(lengths.max()) if len(lengths) else 0
    having = [(lengths > place).nonzero().squeeze(1) for place in range(most)]
    node = torch.zeros_like(lengths)
    for place, units in enumerate(having):
        node[units] = tree.child(node[units], realised[begins[units] + place])
    node = torch.where(follows, node.roll(1), -1)
    nodes = torch.full_like(realised, -1)
    for place, units in enumerate(having):
        nodes[begins[units] + place] = node[units]
        node[units] = tree.child(node[units], realised[begins[units] + place])
    return nodes


def _at_nodes(tree: PieceTree, node: Tensor, is_meant: Tensor, unit: Tensor, num_units: int) -> list[Tensor]:
    """Return the tensors of `units` and `runs`, and lengths of runs [R]."""
    index = is_meant.nonzero().squeeze(1)
    per_unit = torch.bincount(unit[index], minlength=num_units)
    place = ChunkPositions.of(torch.zeros_like(per_unit), per_unit).place
    runs = ChunkPositions.of(tree.first_run[node[index]], tree.num_runs[node[index]])
    return [index, place, per_unit, *runs.tensors, tree.run_length[runs.rows]]


def _nodes(tensors: Sequence[Tensor]) -> NodePositions:
    return NodePositions(ChunkPositions.sent(*tensors[:3]), ChunkPositions.sent(*tensors[3:6]), offsets_of(tensors[6]))
