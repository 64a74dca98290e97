"""Likelihood of aligned chunks under one side's realised tokens."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_opd.losses.chunk_positions import ChunkPositions
from nemo_opd.losses.surprise import surprise


@dataclass(frozen=True, slots=True)
class RealisedChunks:
    """Units of a loss with their tokens and the rows that predict them."""

    positions: ChunkPositions
    targets: Tensor
    """int64 [R]: token ids."""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor, ids: Tensor) -> RealisedChunks:
        """Expand first rows [U] and lengths [U], reading tokens from ids [B, S]."""
        positions = ChunkPositions.of(first_rows, lengths)
        return RealisedChunks(positions, positions.targets(ids))

    def __len__(self) -> int:
        return len(self.positions.lengths)

    def log_likelihood(self, logits: Tensor, part: slice) -> Tensor:
        """Compute each unit's Σ log p(token), [u], from its tokens' logits [R, X]."""
        return -self.positions.sum(surprise(logits, self.targets[self.positions.span(part)]), part)
