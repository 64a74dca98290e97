"""Projection with weights learned together with the student (methods.md §2.8)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nemo_opd.errors import ProjectionError
from nemo_opd.losses.sparse_projection import SparseProjection, TokenPairs, cached_while_alive, slots_within

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

NOTHING_PAIRED = (
    "no row of the projection with several entries is in a pair of h_kl (exact tokens take precedence), so there is "
    "nothing to learn"
)


def learnable_rows(matrix: ProjectionMatrix) -> NDArray[np.int64]:
    """Return the student tokens whose rows have several nonzero entries: int64 [R], ascending."""
    return np.flatnonzero((matrix.weights > 0).sum(axis=1) > 1)


def learnable_pairs(matrix: ProjectionMatrix, pairs: TokenPairs) -> NDArray[np.int64]:
    """Return the indices of pairs whose student token has a learnable row: int64 [m], ascending."""
    return np.flatnonzero(np.isin(pairs.student.cpu().numpy(), learnable_rows(matrix)))


@dataclass(frozen=True, slots=True)
class LearnedShares:
    """Shares of their mass that student tokens of learned rows give to their pairs' cells (methods.md §2.8)."""

    pairs: Tensor
    """int64 [m]: indices of the learned pairs, ascending."""
    log_shares: Tensor
    """float64 [2, m]: log R_st and log(1 − R_st), with a gradient."""

    def split(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Split the pairs' student log-probabilities [U, X] into log-masses of cells [U, X] and a remainder [U, m]."""
        log_share, log_remainder = self.log_shares.to(log_p.dtype)
        learned = log_p.index_select(1, self.pairs)
        return log_p.index_copy(1, self.pairs, learned + log_share), learned + log_remainder


class LearnedProjection(nn.Module):
    """Learned projection R = row-softmax(log R₀ + Δ) on the entries of R₀, for `p_kl` or `h_kl` (methods.md §2.8).

    Rows of one entry, which include exact rows, stay fixed; Δ = 0 gives R₀. After `p_kl(…).loss.backward()`,
    `delta.grad` is the gradient over this rank's units only.
    """

    def __init__(self, matrix: ProjectionMatrix) -> None:
        """Start from a matrix R₀. Raises ProjectionError if no row has several entries, as nothing can be learned."""
        super().__init__()
        self.start = matrix
        """R₀"""
        self.rows = learnable_rows(matrix)
        """[R]: student tokens with learned rows, ascending."""
        if not len(self.rows):
            raise ProjectionError(
                "no row of the projection has several entries, so there is nothing to learn; use it as it is, or build "
                "it with a larger top_k"
            )
        with np.errstate(divide="ignore"):
            log_weights = torch.from_numpy(np.log(matrix.weights[self.rows].astype(np.float64)))
        self.log_start: Tensor
        """float64 [R, K]: log R₀; −inf in slots without an entry."""
        self.register_buffer("log_start", log_weights, persistent=False)
        self.delta = nn.Parameter(torch.zeros(log_weights.shape, dtype=torch.float32))
        """Δ [R, K]; meaningless in slots without an entry."""

    @property
    def student_vocab_size(self) -> int:
        return self.start.student_vocab_size

    @property
    def teacher_vocab_size(self) -> int:
        return self.start.teacher_vocab_size

    def log_weights(self) -> Tensor:
        """Compute log R, float64 [R, K]."""
        return (self.log_start + self.delta).log_softmax(-1)

    def sparse(self, student_vocab_size: int, teacher_vocab_size: int, device: torch.device) -> SparseProjection:
        """Cut R to the given sizes on `device`; its weights have a gradient. Raises ProjectionError as for R₀."""
        sizes = student_vocab_size, teacher_vocab_size
        start = SparseProjection.of(self.start, *sizes, device)
        cells, entries = _learned_cells(self.start, *sizes, device)
        learned = self.log_weights().to(device).flatten().index_select(0, entries)
        block = replace(start.block, log_weight=start.block.log_weight.index_copy(0, cells, learned))
        return replace(start, block=block)

    def shares(self, student_vocab_size: int, teacher_vocab_size: int, device: torch.device) -> LearnedShares:
        """Return the shares of the relaxed pairs of R₀ with learned rows, on `device`, with a gradient.

        Raises ProjectionError if no pair has a learned row.
        """
        places, rows, slots = _learned_pairs(self.start, student_vocab_size, teacher_vocab_size, device)
        if not len(places):
            raise ProjectionError(f"{NOTHING_PAIRED}; use it as it is, or use p_kl, which learns every row")
        log_weights = self.log_weights().to(places.device).index_select(0, rows)
        log_shares = log_weights.gather(1, slots)
        log_remainders = log_weights.scatter(1, slots, -torch.inf).logsumexp(1, keepdim=True)
        return LearnedShares(places, torch.cat([log_shares, log_remainders], 1).T)

    @torch.no_grad()
    def moved(self) -> Tensor:
        """Return the share of each row's weight that has moved from R₀, ½ Σ |R − R₀|: float64 [R]."""
        return (self.log_weights().exp() - self.log_start.softmax(-1)).abs().sum(-1) / 2

    @torch.no_grad()
    def matrix(self) -> ProjectionMatrix:
        """Return R as a matrix that keeps the maps of R₀."""
        weights = self.start.weights.copy()
        weights[self.rows] = self.log_weights().exp().cpu().numpy()
        return self.start.with_weights(weights)


@cached_while_alive
def _learned_pairs(
    matrix: ProjectionMatrix, students: int, teachers: int, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the indices of learned relaxed pairs, int64 [m], and each one's row [m] and slot [m, 1] in Δ."""
    pairs = TokenPairs.relaxed(matrix, students, teachers, torch.device("cpu"))
    places = learnable_pairs(matrix, pairs)
    student_ids, teacher_ids = pairs.student.numpy()[places], pairs.teacher.numpy()[places]
    slots = (matrix.indices[student_ids] == teacher_ids[:, None]).argmax(axis=1)
    rows = np.searchsorted(learnable_rows(matrix), student_ids)
    return (
        torch.from_numpy(places).to(device),
        torch.from_numpy(rows).to(device),
        torch.from_numpy(slots[:, None]).to(device),
    )


@cached_while_alive
def _learned_cells(
    matrix: ProjectionMatrix, students: int, teachers: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the block's cells with learned weights and each one's index into [R · K]: int64 [m] each."""
    student, slot = slots_within(matrix, students, teachers)
    row, learned_rows = np.full(len(matrix.indices), -1), learnable_rows(matrix)
    row[learned_rows] = np.arange(len(learned_rows))
    place = np.where(row[student] >= 0, row[student] * matrix.indices.shape[1] + slot, -1)
    sparse = SparseProjection.of(matrix, students, teachers, device)
    cell_place = np.append(place, -1)[sparse.block.entry.cpu().numpy()]
    cells = np.flatnonzero(cell_place >= 0)
    return torch.from_numpy(cells).to(device), torch.from_numpy(cell_place[cells]).to(device)
