"""Student positions inside of chunks that have a target, and their nodes in the tree of pieces (methods.md §5.7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.losses.chunk_positions import ChunkPositions
from nemo_opd.losses.piece_tree import PieceTree, TreeOn
from nemo_opd.losses.reduction import ChunkUnits, next_tokens


@dataclass(frozen=True, slots=True)
class NodePositions:
    """Some of the compared positions, each with a node of the tree."""

    index: Tensor
    """int64 [I]: a position's place among all that are compared."""
    node: Tensor
    """int64 [I]"""
    per_unit: Tensor
    """int64 [U]: how many of them are in each unit."""


@dataclass(frozen=True, slots=True)
class PositionUnits:
    """The compared positions of each chunk.

    A chunk's first student token is compared at the teacher's boundary. A later one is inside of the chunk's first
    teacher token y, and compared if the chunk's student tokens before it begin the pieces of y, which has more.
    """

    per_unit: Tensor
    """int64 [U]: compared positions, the first of each chunk."""
    inside: NodePositions
    """Positions inside of a teacher token, with the node of the student tokens since it began."""
    before: NodePositions
    """Positions at which teacher tokens that began a token earlier can go on, with the node of the student tokens since
    then. Left out if the teacher's token before is not a chunk by itself.
    """

    @staticmethod
    def of(
        units: ChunkUnits, student_ids: Tensor, teacher_ids: Tensor, tree_on: TreeOn, *, has_before: bool
    ) -> PositionUnits:
        """Find them, as `planned`, by the ids [B, S] and [B, T]. has_before: else `before` has no position."""

        def positions(*tensors: Tensor) -> list[Tensor]:
            return _positions(tree_on(tensors[0].device), *tensors, has_before=has_before)

        fields = (units.student_rows, units.teacher_rows, units.student_lengths, units.teacher_lengths)
        per_unit, *nodes = planned(positions, *fields, student_ids, teacher_ids)
        return PositionUnits(per_unit, NodePositions(*nodes[:3]), NodePositions(*nodes[3:]))


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
    chunks = ChunkPositions.of(student_rows, student_lengths)
    realised, place = chunks.targets(student_ids), chunks.place
    first = chunks.per_position(next_tokens(teacher_ids, teacher_rows).long())
    at = (tree.begin[first] + place).clamp(max=len(tree.pieces) - 1)
    has_piece = place < tree.length[first]
    differs = (~has_piece | (tree.pieces[at] != realised)).long()
    differed = differs.cumsum(0) - differs
    begins = student_lengths.cumsum(0) - student_lengths
    is_like = differed == differed[chunks.per_position(begins)]
    is_compared = (place == 0) | (has_piece & is_like)
    node = torch.where(place == 0, 0, tree.node[at])
    follows = torch.zeros_like(teacher_lengths, dtype=torch.bool)
    follows[1:] = (student_rows + student_lengths)[:-1] == student_rows[1:]
    follows[1:] &= ((teacher_rows + 1)[:-1] == teacher_rows[1:]) & (teacher_lengths[:-1] == 1)
    before = _nodes_from_before(tree, realised, begins, student_lengths, follows & has_before)
    unit = chunks.per_position(torch.arange(len(student_rows), device=place.device))[is_compared]
    num_units = len(student_rows)
    return [
        torch.bincount(unit, minlength=num_units),
        *_at_nodes(node[is_compared], node[is_compared] > 0, unit, num_units),
        *_at_nodes(before[is_compared], before[is_compared] >= 0, unit, num_units),
    ]


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


def _at_nodes(node: Tensor, is_meant: Tensor, unit: Tensor, num_units: int) -> list[Tensor]:
    index = is_meant.nonzero().squeeze(1)
    return [index, node[index], torch.bincount(unit[index], minlength=num_units)]
