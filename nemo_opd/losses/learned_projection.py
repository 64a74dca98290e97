"""A projection whose weights are learned with the student (methods.md §2.8)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from nemo_opd.errors import ProjectionError
from nemo_opd.losses.made_once import made_once
from nemo_opd.losses.sparse_projection import SparseProjection, slots_within

if TYPE_CHECKING:
    from nemo_opd.losses.pairs import TokenPairs
    from nemo_opd.projection import ProjectionMatrix

NOTHING_PAIRED = (
    "no row of the projection that has several entries is in a pair of h_kl (a tokenizer's exact tokens come first), "
    "so there is nothing to learn"
)


def learnable_rows(matrix: ProjectionMatrix) -> NDArray[np.int64]:
    """Return the student tokens, ascending, whose rows have several entries with weight: int64 [R]."""
    return np.flatnonzero((matrix.weights > 0).sum(axis=1) > 1)


def learnable_pairs(matrix: ProjectionMatrix, pairs: TokenPairs) -> NDArray[np.int64]:
    """Return which pairs, ascending, have a student token whose row is learnable: int64 [m]."""
    return np.flatnonzero(np.isin(pairs.student.cpu().numpy(), learnable_rows(matrix)))


@dataclass(frozen=True, slots=True)
class LearnedShares:
    """The shares that student tokens of learned rows give to the cells of their pairs (methods.md §2.8)."""

    pairs: Tensor
    """int64 [m]: places among the pairs, ascending."""
    log_shares: Tensor
    """float64 [2, m]: log R_st and log(1 − R_st), with a gradient."""

    def split(self, log_p: Tensor) -> tuple[Tensor, Tensor]:
        """Part log-probabilities of the pairs' student tokens [U, X] into those of the cells, and the rest's [U, m]."""
        given, left = self.log_shares.to(log_p.dtype)
        learned = log_p.index_select(1, self.pairs)
        return log_p.index_copy(1, self.pairs, learned + given), learned + left


class LearnedProjection(nn.Module):
    """R = row-softmax(log R₀ + Δ) on the entries of R₀, for `p_kl` or `h_kl` in place of a matrix (methods.md §2.8).

    Rows of one entry, exact ones among them, stay as they are; Δ = 0 is R₀. After `p_kl(…).loss.backward()`,
    `delta.grad` is the gradient of that loss, of this rank's units alone.
    """

    def __init__(self, matrix: ProjectionMatrix) -> None:
        """Raise ProjectionError for a matrix R₀ without a row of several entries, in which nothing can be learned."""
        super().__init__()
        self.start = matrix
        """R₀"""
        self.rows = learnable_rows(matrix)
        """[R]: student tokens whose rows are learned, ascending."""
        if not len(self.rows):
            raise ProjectionError(
                "no row of the projection has several entries, so there is nothing to learn; use it as it is, or build "
                "it with a larger top_k"
            )
        with np.errstate(divide="ignore"):
            log_weights = torch.from_numpy(np.log(matrix.weights[self.rows].astype(np.float64)))
        self.log_start: Tensor
        """float64 [R, K]: log R₀; −inf where there is no entry."""
        self.register_buffer("log_start", log_weights, persistent=False)
        self.delta = nn.Parameter(torch.zeros(log_weights.shape, dtype=torch.float32))
        """Δ [R, K]; without meaning where there is no entry."""

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
        """Cut R to the given sizes on `device`; its block's weights have a gradient. Raises ProjectionError as R₀."""
        sizes = student_vocab_size, teacher_vocab_size
        start = SparseProjection.of(self.start, *sizes, device)
        cells, entries = self._learned_cells(start, *sizes, device)
        learned = self.log_weights().to(device).flatten().index_select(0, entries)
        block = replace(start.block, log_weight=start.block.log_weight.index_copy(0, cells, learned))
        return replace(start, block=block)

    def shares(self, pairs: TokenPairs) -> LearnedShares:
        """Return the shares of those of the pairs of R₀ whose rows are learned; they have a gradient.

        Raises ProjectionError where there is none.
        """
        places, rows, slots = self._learned_pairs(pairs)
        log_weights = self.log_weights().to(places.device).index_select(0, rows)
        given = log_weights.gather(1, slots)
        left = log_weights.scatter(1, slots, -torch.inf).logsumexp(1, keepdim=True)
        return LearnedShares(places, torch.cat([given, left], 1).T)

    def _learned_pairs(self, pairs: TokenPairs) -> tuple[Tensor, Tensor, Tensor]:
        """Return the pairs that are learned, int64 [m], and the row [m] and the slot [m, 1] of each in Δ."""
        indices, weights, device = self.start.indices, self.start.weights, pairs.student.device

        def make() -> tuple[Tensor, Tensor, Tensor]:
            places = learnable_pairs(self.start, pairs)
            students, teachers = (side.cpu().numpy()[places] for side in (pairs.student, pairs.teacher))
            slots = (indices[students] == teachers[:, None]).argmax(axis=1)
            rows = np.searchsorted(self.rows, students)
            return (
                torch.from_numpy(places).to(device),
                torch.from_numpy(rows).to(device),
                torch.from_numpy(slots[:, None]).to(device),
            )

        sizes = len(pairs.place), len(pairs) + len(pairs.teacher_rest)
        found = made_once(make, (indices, weights), LearnedShares, *sizes, device)
        if not len(found[0]):
            raise ProjectionError(f"{NOTHING_PAIRED}; use it as it is, or use p_kl, which learns every row")
        return found

    def _learned_cells(
        self, sparse: SparseProjection, students: int, teachers: int, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        """Return the cells of the block that are learned, and the place of each in [R · K]: int64 [m] each."""
        indices, weights = self.start.indices, self.start.weights

        def make() -> tuple[Tensor, Tensor]:
            student, slot = slots_within(indices, weights, students, teachers)
            row = np.full(len(indices), -1)
            row[self.rows] = np.arange(len(self.rows))
            place = np.where(row[student] >= 0, row[student] * indices.shape[1] + slot, -1)
            of_cells = np.append(place, -1)[sparse.block.entry.cpu().numpy()]
            cells = np.flatnonzero(of_cells >= 0)
            return torch.from_numpy(cells).to(device), torch.from_numpy(of_cells[cells]).to(device)

        return made_once(make, (indices, weights), LearnedProjection, students, teachers, device)

    @torch.no_grad()
    def moved(self) -> Tensor:
        """Return how far each row is from R₀: ½ Σ |R − R₀|, the share of its weight that has moved, float64 [R]."""
        return (self.log_weights().exp() - self.log_start.softmax(-1)).abs().sum(-1) / 2

    @torch.no_grad()
    def matrix(self) -> ProjectionMatrix:
        """Return R as a matrix, with the maps of R₀."""
        weights = self.start.weights.copy()
        weights[self.rows] = self.log_weights().exp().cpu().numpy()
        return self.start.with_weights(weights)
