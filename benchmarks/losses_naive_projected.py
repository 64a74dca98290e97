"""Losses that bring one vocabulary onto another (methods.md §5: p_kl, byte_prefix, shared_prefix), as plain PyTorch.

Every function takes logits/τ of the chunks' first positions, [U, V] and [U, W], and returns one loss per chunk, [U].
Index tensors are made beforehand.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from nemo_opd.losses.piece_tree import first_pieces
from nemo_opd.projection import ProjectionMatrix

Cellwise = Callable[[Tensor, Tensor], Tensor]
"""Log-probabilities of teacher and student [..., X] → what each cell adds to the divergence, [..., X]."""


@dataclass(frozen=True)
class Entries:
    """The nonzero entries of a projection, on its covered columns only, X of them."""

    student: Tensor
    """int64 [nnz]"""
    cell: Tensor
    """int64 [nnz]: which covered column."""
    weight: Tensor
    """float64 [nnz]"""
    columns: Tensor
    """int64 [X]: teacher tokens."""

    @staticmethod
    def of(projection: ProjectionMatrix) -> "Entries":
        student, slot = np.nonzero((projection.indices >= 0) & (projection.weights > 0))
        columns, cell = np.unique(projection.indices[student, slot], return_inverse=True)
        weight = projection.weights[student, slot].astype(np.float64)
        return Entries(_index(student), _index(cell), torch.from_numpy(weight), _index(columns))

    def project(self, p: Tensor) -> Tensor:
        """Probabilities [U, V] → Rᵀp [U, X]."""
        mass = p[:, self.student] * self.weight.to(p.dtype)
        return p.new_zeros(len(p), len(self.columns)).index_add(1, self.cell, mass)


def p_kl(student: Tensor, teacher: Tensor, divergence: Cellwise, entries: Entries) -> Tensor:
    projected = entries.project(student.softmax(-1))
    covered = projected.sum(-1, keepdim=True)
    log_q = teacher[:, entries.columns].log_softmax(-1)
    return divergence(log_q, _log(projected / covered)).sum(-1) - covered.squeeze(-1).log()


def p_kl_top_k(student: Tensor, teacher: Tensor, divergence: Cellwise, entries: Entries, k: int) -> Tensor:
    """On the k covered columns with the largest teacher logit of all positions, and one cell for the others."""
    projected = entries.project(student.softmax(-1))
    covered = projected.sum(-1, keepdim=True)
    z = teacher[:, entries.columns]
    order = z.amax(0).argsort(descending=True)
    kept, others = order[:k], order[k:]
    cells_q, cells_p = (
        torch.cat([side[:, kept], side[:, others].sum(-1, keepdim=True)], -1)
        for side in (z.softmax(-1), projected / covered)
    )
    return divergence(_log(cells_q), _log(cells_p)).sum(-1) - covered.squeeze(-1).log()


@dataclass(frozen=True)
class SharedCells:
    """Cells that tokens of both sides fall into, X of them, the rest cell among them where both sides have one."""

    student_token: Tensor
    """int64: the student tokens that have a cell,"""
    student_cell: Tensor
    """int64: and which."""
    teacher_token: Tensor
    teacher_cell: Tensor
    size: int

    @staticmethod
    def of(projection: ProjectionMatrix) -> "SharedCells":
        sides = projection.student_shared_prefix, projection.teacher_shared_prefix
        assert sides[0] is not None
        assert sides[1] is not None
        common = np.intersect1d(sides[0], sides[1])
        tokens = [np.flatnonzero(np.isin(side, common)) for side in sides]
        cells = [np.searchsorted(common, side[token]) for side, token in zip(sides, tokens, strict=True)]
        return SharedCells(_index(tokens[0]), _index(cells[0]), _index(tokens[1]), _index(cells[1]), len(common))


def shared_prefix(student: Tensor, teacher: Tensor, divergence: Cellwise, cells: SharedCells) -> Tensor:
    p, q = student.softmax(-1)[:, cells.student_token], teacher.softmax(-1)[:, cells.teacher_token]
    p = p.new_zeros(len(p), cells.size).index_add(1, cells.student_cell, p)
    q = q.new_zeros(len(q), cells.size).index_add(1, cells.teacher_cell, q)
    return divergence(_log_normalised(q), _log_normalised(p)).sum(-1)


@dataclass(frozen=True)
class PrefixCells:
    """φ, a teacher token's first piece, and the student tokens that it reaches. Cells are these and the rest."""

    cell: Tensor
    """int64 [W]: φ(t), V for the rest."""
    is_reached: Tensor
    """bool [V]"""
    has_rest: bool
    """Both sides have tokens in the rest, the student more than one."""

    @staticmethod
    def of(projection: ProjectionMatrix) -> "PrefixCells":
        phi, size = first_pieces(projection, "spelling"), projection.student_vocab_size
        is_reached = np.isin(np.arange(size), phi)
        has_rest = bool((phi < 0).any() and (~is_reached).sum() > 1)
        return PrefixCells(_index(np.where(phi < 0, size, phi)), torch.from_numpy(is_reached), has_rest)


@dataclass(frozen=True)
class Chains:
    """Chunks of one student token x and several teacher tokens y_1..y_n, G of them."""

    unit: Tensor
    """int64 [G]: which units they are."""
    realised: Tensor
    """int64 [G]: x."""
    first: Tensor
    """int64 [G]: y_1."""
    later_chain: Tensor
    """int64 [R]: the chain of each further token y_2..y_n,"""
    later_row: Tensor
    """int64 [R]: the row of the flattened teacher logits that predicts it,"""
    later_meant: Tensor
    """bool [R, W]: and what counts as it: the token alone; as the last of its chunk all tokens that begin with it."""

    def log_share(self, later: Tensor) -> Tensor:
        """Logits/τ [R, W] of `later_row` → log of the probability of all that follows y_1 in each chain, [G]."""
        log_each = later.log_softmax(-1).masked_fill(~self.later_meant, -torch.inf).logsumexp(-1)
        return log_each.new_zeros(len(self.unit)).index_add(0, self.later_chain, log_each)


def byte_prefix(
    student: Tensor, teacher: Tensor, divergence: Cellwise, cells: PrefixCells, chains: Chains, log_share: Tensor
) -> Tensor:
    """`log_share` [G] of the chains. The whole chain-factorised bound, on dense rows of V + 1 cells."""
    p, q = student.softmax(-1), teacher.softmax(-1)
    u = q.new_zeros(len(q), p.shape[-1] + 1).index_add(1, cells.cell, q)
    moved = q[chains.unit, chains.first] * log_share.exp()
    u = u.index_put((chains.unit, cells.cell[chains.first]), -moved, accumulate=True)
    u = u.index_put((chains.unit, chains.realised), moved, accumulate=True)
    has_cell = cells.is_reached.expand_as(p).clone()
    has_cell[chains.unit, chains.realised] = True
    v = torch.cat([p * has_cell, (p * ~has_cell).sum(-1, keepdim=True)], -1)
    if not cells.has_rest:
        u, v = u[:, :-1], v[:, :-1]
    return divergence(_log_normalised(u), _log_normalised(v)).sum(-1)


def _log_normalised(mass: Tensor) -> Tensor:
    return _log(mass / mass.sum(-1, keepdim=True))


def _log(p: Tensor) -> Tensor:
    """Empty cells would be −inf, and −inf − −inf is NaN."""
    return p.clamp(min=torch.finfo(p.dtype).tiny).log()


def _index(ids: np.ndarray) -> Tensor:
    return torch.from_numpy(ids.astype(np.int64))
