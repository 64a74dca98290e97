"""Teacher mass below nodes of the tree of pieces, for each next piece (methods.md §5.7)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.losses.chunk_positions import segments_log_sum_exp, segments_reduced
from nemo_opd.losses.piece_tree import PieceTree
from nemo_opd.losses.position_units import NodePositions


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
    run_of_token = torch.arange(len(run), device=row.device).repeat_interleave(length, output_size=num_tokens)
    place = torch.arange(num_tokens, device=row.device) - (length.cumsum(0) - length)[run_of_token]
    token = tree.order[tree.run_begin[run][run_of_token] + place]
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
