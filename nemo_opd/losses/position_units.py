"""Compared student positions of chunks, and the teacher mass below their nodes (methods.md §5.7)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.losses.arguments import ChunkUnits, chunk_units, next_tokens
from nemo_opd.losses.chunk_loss import (
    ChunkPositions,
    offsets_of,
    places_of_runs,
    segments_log_sum_exp,
    segments_reduced,
)
from nemo_opd.losses.piece_tree import PieceTree

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@dataclass(frozen=True, slots=True)
class NodePositions:
    """A subset of the compared positions, each with a node of the tree."""

    units: ChunkPositions
    """[I], grouped by unit; `rows` are indices into all compared positions."""
    runs: ChunkPositions
    """[R]: the tree's runs below each node, grouped by position."""
    token_offsets: Sequence[int]
    """[R + 1]: where each run begins among the tokens of all runs; on the host."""

    @property
    def unit_offsets(self) -> list[int]:
        """[U + 1]: where each unit begins among the tokens of all runs."""
        return [self.token_offsets[self.runs.offsets[begin]] for begin in self.units.offsets]


@dataclass(frozen=True, slots=True)
class PositionUnits:
    """The compared positions of each chunk.

    A chunk's first student token is compared at the teacher token boundary, later ones inside the chunk's first teacher
    token. One that ends beyond that token is compared only if it is the chunk's last, as only then `Chains` gives it a
    target.
    """

    student: ChunkPositions
    """[P]: all compared positions, grouped by chunk; they are each chunk's leading tokens."""
    inside: NodePositions
    """Positions inside a teacher token, with the node of the student tokens since its beginning."""
    before: NodePositions
    """Positions that teacher tokens beginning one token earlier can reach, with the node of the student tokens since
    that beginning. Only if the preceding teacher token is a chunk by itself.
    """
    rows_before: ChunkPositions
    """The row that predicts the preceding teacher token, for units with positions in `before`."""

    @staticmethod
    def of(
        units: ChunkUnits,
        student_ids: Tensor,
        teacher_ids: Tensor,
        tree_on: Callable[[torch.device], PieceTree],
        *,
        has_before: bool,
    ) -> PositionUnits:
        """Find the positions in ids [B, S] and [B, T], through `compute_on_host`. has_before: fill `before`."""

        def positions(*tensors: Tensor) -> list[Tensor]:
            student_ids, teacher_ids = tensors[4:]
            tokens = _ChunkTokens.of(tree_on(student_ids.device), ChunkUnits(*tensors[:4]), student_ids, teacher_ids)
            return _positions(tokens, has_before)

        tensors = compute_on_host(positions, *units.tensors, student_ids, teacher_ids)
        return PositionUnits(
            ChunkPositions.sent(*tensors[:3]),
            _node_positions(tensors[3:10]),
            _node_positions(tensors[10:17]),
            ChunkPositions.sent(*tensors[17:]),
        )


def compared_positions(
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    projection: ProjectionMatrix,
    pieces: str,
) -> Tensor:
    """Return which student tokens are compared, from ids and chunk ids [B, S] and [B, T]: bool [B, S]."""
    sizes = projection.student_vocab_size, projection.teacher_vocab_size
    units = chunk_units(student_chunk_id, teacher_chunk_id)

    def positions(*tensors: Tensor) -> list[Tensor]:
        student_ids, teacher_ids = tensors[4:]
        tree = PieceTree.of(projection, pieces, *sizes, student_ids.device)
        tokens = _ChunkTokens.of(tree, ChunkUnits(*tensors[:4]), student_ids, teacher_ids)
        is_compared = torch.zeros(student_ids.numel(), dtype=torch.bool, device=student_ids.device)
        is_compared[tokens.chunks.rows[tokens.is_compared] + 1] = True
        return [is_compared.view_as(student_ids)]

    return compute_on_host(positions, *units.tensors, student_ids, teacher_ids)[0]


@dataclass(frozen=True, slots=True)
class _ChunkTokens:
    """All R student tokens of the chunks."""

    tree: PieceTree
    units: ChunkUnits
    chunks: ChunkPositions
    realised: Tensor
    """int64 [R]: token ids."""
    unit: Tensor
    """int64 [R]: each token's chunk."""
    first: Tensor
    """int64 [U]: each chunk's first teacher token."""
    node: Tensor
    """int64 [R]: the tree's node for the student tokens since the teacher token began: of these tokens if they are its
    first pieces, else of their bytes.
    """
    num_bytes: Tensor
    """int64 [R]: number of bytes from the beginning of the chunk."""
    is_unusual: Tensor
    """bool [R]: whether tokens of the chunk before this one are not the teacher token's first pieces."""
    ends_unusually: Tensor
    """bool [U]: whether a chunk's tokens are not the pieces of its first teacher token."""
    is_compared: Tensor
    """bool [R]"""

    @staticmethod
    def of(tree: PieceTree, units: ChunkUnits, student_ids: Tensor, teacher_ids: Tensor) -> _ChunkTokens:
        lengths = units.student_lengths
        chunks = ChunkPositions.of(units.student_rows, lengths)
        realised, place = chunks.targets(student_ids), chunks.place
        unit = chunks.per_position(torch.arange(len(units), device=place.device))
        text, begins = tree.teacher_text, lengths.cumsum(0) - lengths
        first_of_unit = next_tokens(teacher_ids, units.teacher_rows).long()
        first = first_of_unit[unit]
        piece = (tree.begin[first] + place).clamp(max=len(tree.pieces) - 1)
        has_piece = place < tree.length[first]
        differs = ~has_piece | (tree.pieces[piece] != realised)
        num_different = differs.long().cumsum(0) - differs.long()
        is_unusual = (place > 0) & ((num_different != num_different[begins][unit]) | ~has_piece)
        ends_unusually = torch.zeros_like(lengths).index_add_(0, unit, differs.long()) > 0
        size = tree.num_student_bytes[realised]
        num_bytes = size.cumsum(0) - size
        num_bytes -= num_bytes[begins][unit]
        is_last = (units.teacher_lengths == 1)[unit] | (place == lengths[unit] - 1)
        ends_inside = num_bytes + size <= text.length[first]
        is_compared = (place == 0) | ((num_bytes > 0) & (num_bytes < text.length[first]) & (ends_inside | is_last))
        byte_node = tree.first_byte_node + text.node[(text.begin[first] + num_bytes).clamp(max=len(text.node) - 1)]
        node = torch.where(place == 0, 0, torch.where(is_unusual, byte_node, tree.node[piece]))
        return _ChunkTokens(
            tree, units, chunks, realised, unit, first_of_unit, node, num_bytes, is_unusual, ends_unusually, is_compared
        )


def _positions(tokens: _ChunkTokens, has_before: bool) -> list[Tensor]:
    """Return the tensors of all fields of `PositionUnits`."""
    tree, (student_rows, teacher_rows, student_lengths, teacher_lengths) = tokens.tree, tokens.units.tensors
    begins = student_lengths.cumsum(0) - student_lengths
    follows = torch.zeros_like(teacher_lengths, dtype=torch.bool)
    follows[1:] = (student_rows + student_lengths)[:-1] == student_rows[1:]
    follows[1:] &= ((teacher_rows + 1)[:-1] == teacher_rows[1:]) & (teacher_lengths[:-1] == 1)
    follows &= has_before
    earlier_node = _nodes_since_previous_chunk(tree, tokens.realised, begins, student_lengths, follows)
    is_unusual = (
        tokens.is_compared & follows[tokens.unit] & (tokens.is_unusual | tokens.ends_unusually.roll(1)[tokens.unit])
    )
    earlier_node[is_unusual] = _byte_nodes_since_previous_chunk(tokens, is_unusual)
    # At a boundary only the realised token ends at such a node, and the target already contains it.
    is_boundary = tokens.chunks.place == 0
    earlier_node = earlier_node.masked_fill(is_boundary & ~tree.has_pieces_below(earlier_node.clamp(min=0)), -1)
    unit, node, earlier_node = (x[tokens.is_compared] for x in (tokens.unit, tokens.node, earlier_node))
    per_unit = torch.bincount(unit, minlength=len(student_rows))
    inside = _node_position_tensors(tree, node, node > 0, unit, len(student_rows))
    before = _node_position_tensors(tree, earlier_node, earlier_node >= 0, unit, len(student_rows))
    rows_before = ChunkPositions.of(teacher_rows - 1, before[2].clamp(max=1))
    return [*ChunkPositions.of(student_rows, per_unit).tensors, *inside, *before, *rows_before.tensors]


def _nodes_since_previous_chunk(
    tree: PieceTree, realised: Tensor, begins: Tensor, lengths: Tensor, follows: Tensor
) -> Tensor:
    """Return each token's node for the tokens since the previous chunk began: int64 [R], −1 if the tree has none.

    follows: bool [U], whether the previous chunk is adjacent and has one teacher token.
    """
    max_length = int(lengths.max()) if len(lengths) else 0
    units_at_place = [(lengths > place).nonzero().squeeze(1) for place in range(max_length)]
    node = torch.zeros_like(lengths)
    for place, units in enumerate(units_at_place):
        node[units] = tree.child(node[units], realised[begins[units] + place])
    node = torch.where(follows, node.roll(1), -1)
    nodes = torch.full_like(realised, -1)
    for place, units in enumerate(units_at_place):
        nodes[begins[units] + place] = node[units]
        node[units] = tree.child(node[units], realised[begins[units] + place])
    return nodes


def _byte_nodes_since_previous_chunk(tokens: _ChunkTokens, selected: Tensor) -> Tensor:
    """Return the node of the bytes since the previous chunk began, −1 if the tree has none: int64, of selected tokens.

    selected: bool [R], compared tokens whose previous chunk has one teacher token.
    """
    text, unit, num_bytes = tokens.tree.teacher_text, tokens.unit[selected], tokens.num_bytes[selected]
    node, begin = text.end_node(tokens.first[unit - 1]), text.begin[tokens.first[unit]]
    for place in range(int(num_bytes.max()) if len(unit) else 0):
        goes_on = (place < num_bytes) & (node >= 0)
        node[goes_on] = text.child(node[goes_on], text.values[begin[goes_on] + place])
    return torch.where(node >= 0, node + tokens.tree.first_byte_node, -1)


def _node_position_tensors(
    tree: PieceTree, node: Tensor, is_selected: Tensor, unit: Tensor, num_units: int
) -> list[Tensor]:
    """Return the seven tensors of `NodePositions`: of `units`, of `runs`, and the runs' numbers of tokens [R]."""
    index = is_selected.nonzero().squeeze(1)
    per_unit = torch.bincount(unit[index], minlength=num_units)
    place = ChunkPositions.of(torch.zeros_like(per_unit), per_unit).place
    runs = ChunkPositions.of(tree.first_run[node[index]], tree.num_runs[node[index]])
    return [index, place, per_unit, *runs.tensors, tree.run_length[runs.rows]]


def _node_positions(tensors: Sequence[Tensor]) -> NodePositions:
    return NodePositions(ChunkPositions.sent(*tensors[:3]), ChunkPositions.sent(*tensors[3:6]), offsets_of(tensors[6]))


@dataclass(frozen=True, slots=True)
class ChildMasses:
    """Masses of the r runs below the nodes of a part's positions."""

    position: Tensor
    """int64 [r]: index into the part's compared positions."""
    cell: Tensor
    """int64 [r]: the next piece, or V for the teacher tokens that end at the node."""
    log_mass: Tensor
    """[r]: −inf if the teacher gives no mass to the run."""
    num_unknown: Tensor | None
    """[r]: tokens of the run that a truncated teacher does not store; None for a full teacher."""


@dataclass(frozen=True, slots=True)
class KeptShares:
    """One teacher token per position, and the share of its mass that stays with its pieces."""

    token: Tensor
    """int64 [i], −1 if all mass stays."""
    log_share: Tensor
    """[i]"""

    @staticmethod
    def all(row: Tensor, dtype: torch.dtype) -> KeptShares:
        """Keep all mass at positions [i]."""
        return KeptShares(torch.full_like(row, -1), torch.zeros(len(row), dtype=dtype, device=row.device))


def child_masses(
    nodes: NodePositions,
    tree: PieceTree,
    logits: Tensor,
    row: Tensor,
    part: slice,
    first_position: int,
    shares: KeptShares,
    *,
    is_truncated: bool,
) -> ChildMasses:
    """Sum the masses below the nodes of a part's positions, from a teacher's logits/τ [u, W].

    row: int64 [i], the row of each position with a node. first_position: index of the part's first position among all
    compared positions.
    """
    positions = nodes.units.span(part)
    runs = nodes.runs.span(positions)
    num_tokens = nodes.token_offsets[runs.stop] - nodes.token_offsets[runs.start]
    run = nodes.runs.rows[runs]
    position = torch.arange(positions.stop - positions.start, device=row.device)
    position = position.repeat_interleave(nodes.runs.lengths[positions], output_size=len(run))
    length = tree.run_length[run]
    run_of_token, place = places_of_runs(tree.run_begin[run], length, num_tokens)
    token = tree.order[place]
    position_of_token = position[run_of_token]
    log_p = logits[row[position_of_token], token]
    log_kept = torch.where(token == shares.token[position_of_token], shares.log_share[position_of_token], 0)
    log_mass = segments_log_sum_exp((log_p + log_kept).unsqueeze(1), length).squeeze(1)
    return ChildMasses(
        nodes.units.rows[positions][position] - first_position,
        tree.run_cell(run),
        log_mass.masked_fill(log_mass == torch.finfo(log_mass.dtype).min, -torch.inf),
        segments_reduced("sum", (log_p == -torch.inf).to(log_p.dtype), length) if is_truncated else None,
    )
