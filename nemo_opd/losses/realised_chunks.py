"""Aligned chunks with the tokens that stand for them on one side, and their likelihood."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_opd.losses.chunk_positions import ChunkPositions
from nemo_opd.losses.surprise import surprise


@dataclass(frozen=True, slots=True)
class RealisedChunks:
    """Units of a loss: the rows that predict their tokens, and these tokens."""

    positions: ChunkPositions
    targets: Tensor
    """int64 [R]"""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor, ids: Tensor) -> RealisedChunks:
        """Make them from first rows [U], lengths [U] and ids [B, S]."""
        positions = ChunkPositions.of(first_rows, lengths)
        return RealisedChunks(positions, positions.targets(ids))

    def __len__(self) -> int:
        return len(self.positions.lengths)

    def log_likelihood(self, logits: Tensor, part: slice) -> Tensor:
        """Compute Σ log p(token) over each unit's tokens [u], from their logits [R, X]."""
        return -self.positions.sum(surprise(logits, self.targets[self.positions.span(part)]), part)
