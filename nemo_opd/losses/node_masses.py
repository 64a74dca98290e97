"""The teacher's mass below nodes of the tree of pieces, by the next piece (methods.md §5.7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.losses.chunk_positions import ChunkPositions
from nemo_opd.losses.piece_tree import PieceTree, TreeOn
from nemo_opd.losses.position_units import NodePositions


@dataclass(frozen=True, slots=True)
class ChildMasses:
    """Masses of the runs below the nodes of a part's positions."""

    position: Tensor
    """int64 [r]: places among the part's compared positions."""
    cell: Tensor
    """int64 [r]: the next piece, or V for the teacher tokens that end at the node."""
    log_mass: Tensor
    """[r]: −inf if the teacher gives nothing to any token of the run."""
    num_unknown: Tensor
    """[r]: tokens of the run that the teacher gives nothing."""


@dataclass(frozen=True, slots=True)
class NodeMasses:
    """Positions with nodes, and the teacher tokens below these."""

    positions: NodePositions
    units: ChunkPositions
    """Cuts the positions by unit; its rows mean nothing."""
    runs: ChunkPositions
    """Runs of the tree, node after node."""
    tokens: ChunkPositions
    """Places in the tree's order, run after run."""
    tree: PieceTree

    @staticmethod
    def of(positions: NodePositions, tree_on: TreeOn) -> NodeMasses:
        """Expand the nodes. Waits for the device if the host does not know them."""

        def runs_of(node: Tensor) -> list[Tensor]:
            tree = tree_on(node.device)
            return [tree.first_run[node], tree.num_runs[node]]

        def tokens_of(run: Tensor) -> list[Tensor]:
            tree = tree_on(run.device)
            return [tree.run_begin[run], tree.run_length[run]]

        runs = ChunkPositions.of(*planned(runs_of, positions.node))
        tokens = ChunkPositions.of(*planned(tokens_of, runs.rows))
        units = ChunkPositions.of(positions.per_unit, positions.per_unit)
        return NodeMasses(positions, units, runs, tokens, tree_on(positions.node.device))

    @property
    def token_offsets(self) -> list[int]:
        """[U + 1]: where units begin among the teacher tokens of all nodes."""
        return [self.tokens.offsets[self.runs.offsets[begin]] for begin in self.units.offsets]

    def of_part(self, log_q: Tensor, row: Tensor, part: slice, first_position: int, kept: KeptShares) -> ChildMasses:
        """Sum the masses of a part's nodes from log-probabilities [u, W]; row: int64 [i], of each position with a node.

        first_position: of the part, among all compared positions.
        """
        at = self.units.span(part)
        runs = self.runs.span(at)
        of_run = _repeat(torch.arange(at.stop - at.start, device=row.device), self.runs.lengths[at], runs)
        tokens = self.tokens.span(runs)
        of_token = _repeat(of_run, self.tokens.lengths[runs], tokens)
        token = self.tree.order[self.tokens.rows[tokens]]
        log_p = log_q[row[of_token], token]
        log_kept = torch.where(token == kept.token[of_token], kept.log_share[of_token], 0)
        log_mass = self.tokens.log_sum_exp((log_p + log_kept).unsqueeze(1), runs).squeeze(1)
        num_unknown = self.tokens.sum((log_p == -torch.inf).to(log_p.dtype), runs)
        return ChildMasses(
            self.positions.index[at][of_run] - first_position,
            self.tree.run_cell(self.runs.rows[runs]),
            log_mass.masked_fill(log_mass == torch.finfo(log_mass.dtype).min, -torch.inf),
            num_unknown,
        )


@dataclass(frozen=True, slots=True)
class KeptShares:
    """A teacher token of each position, and log of the share of its mass that stays where its pieces are."""

    token: Tensor
    """int64 [i]: −1 for none."""
    log_share: Tensor
    """[i]"""

    @staticmethod
    def all(row: Tensor, dtype: torch.dtype) -> KeptShares:
        """Let all mass stay at positions [i]."""
        return KeptShares(torch.full_like(row, -1), torch.zeros(len(row), dtype=dtype, device=row.device))


def _repeat(values: Tensor, lengths: Tensor, span: slice) -> Tensor:
    return values.repeat_interleave(lengths, output_size=span.stop - span.start)
