"""Supports of divergences and the mass outside them (methods.md §3.3), also of truncated teachers (§9.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.logits.blockwise import scaled
from nemo_opd.logits.rows import LogitRows, SparseLogits
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.fused import log_sum_exp, softmax

FAINT = 1e-20
"""Mass below which single tokens' probabilities may be subnormal in fp32."""
_GROUP = 8
"""Columns per group when searching for the largest."""


@dataclass(frozen=True, slots=True)
class Support:
    """Rule that chooses the compared columns of each unit."""

    kind: str = "full"
    """full: every column; teacher_topk, student_topk: that side's `top_k` likeliest; union: both sides'."""
    top_k: int | None = None
    """Columns chosen per side; at or above the vocabulary size all columns are compared."""
    normalization: str = "rest"
    """rest, support or full; all the same if every column is chosen.

    rest: probabilities over the vocabulary, with one more cell for each side's mass elsewhere. The value is ≥ 0 and at
    most the divergence over the vocabulary.
    support: probabilities renormalised on the chosen columns, for parity with systems that do so; the mass elsewhere is
    not trained.
    full: probabilities over the vocabulary, summed over the chosen columns only, also for parity; the sum may be
    negative, and forward and reverse KL have a gradient even if student and teacher are equal.
    """

    def __post_init__(self) -> None:
        check_choice("support", self.kind, ("full", "teacher_topk", "student_topk", "union"))
        check_choice("normalization", self.normalization, ("full", "support", "rest"))
        if self.kind == "full" and self.top_k is not None:
            raise ConfigError(
                f"top_k={self.top_k}: support=full takes every column; choose another support, or leave top_k out"
            )
        if self.kind != "full" and self.top_k is None:
            raise ConfigError(f"support={self.kind} needs top_k; give the number of columns per side")
        if self.top_k == 1 and self.normalization == "support" and self.kind != "union":
            raise ConfigError(
                "top_k=1 with normalization=support: one renormalised column is 1 on both sides, and nothing is "
                "learned; give a larger number, or normalization=rest"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: a support has at least 1 column; give a larger number")

    def compare(self, divergence: Divergence, teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
        """Compare units, in nats: logits/τ [U, V] of teacher and student → [U] (methods.md §3.3).

        Neither the choice of columns nor the teacher gets a gradient.
        """
        if self.takes_all(student_logits.shape[-1]):
            return divergence.of_logits(teacher_logits, student_logits)
        columns = self.choose(teacher_logits, student_logits)
        if self.normalization == "support":
            return divergence.of_logits(columns.take(teacher_logits), columns.take(student_logits))
        cells_t, cells_s = columns.cells(teacher_logits), columns.cells(student_logits)
        if self.normalization == "rest":
            return divergence.of_logits(cells_t, cells_s)
        return partial_divergence(divergence, cells_t.log_softmax(-1)[:, :-1], cells_s.log_softmax(-1)[:, :-1])

    def takes_all(self, num_columns: int) -> bool:
        return self.top_k is None or self.top_k >= num_columns

    def num_cells(self, num_columns: int) -> int:
        """Return the maximum number of cells of a unit with `num_columns` columns."""
        if self.top_k is None or self.takes_all(num_columns):
            return num_columns
        return (2 if self.kind == "union" else 1) * self.top_k + 1

    def choose(self, teacher_logits: Tensor, student_logits: Tensor) -> Columns:
        """Choose the columns of each unit from both sides' logits [U, V], with `top_k` < V."""
        assert self.top_k is not None
        if self.kind == "teacher_topk":
            return Columns(largest(teacher_logits, self.top_k))
        if self.kind == "student_topk":
            return Columns(largest(student_logits, self.top_k))
        return Columns.union(
            largest(teacher_logits, self.top_k), largest(student_logits, self.top_k), teacher_logits.shape[-1]
        )


@dataclass(frozen=True, slots=True)
class Columns:
    """Chosen columns of each unit."""

    index: Tensor
    """int64 [U, X]"""
    repeated: Tensor | None = None
    """bool [U, X]: the column occurs earlier in its row and is not a cell here. None if no column repeats."""

    @staticmethod
    def union(first: Tensor, second: Tensor, num_columns: int) -> Columns:
        """Join column indices [U, X] and [U, Y] below `num_columns`, each without repeats in a row."""
        in_first = torch.zeros(len(first), num_columns, dtype=torch.bool, device=first.device).scatter_(1, first, True)
        repeated = torch.cat([torch.zeros_like(first, dtype=torch.bool), in_first.gather(1, second)], 1)
        return Columns(torch.cat([first, second], 1), repeated)

    def take(self, rows: Tensor) -> Tensor:
        """Select logits or log-probabilities: [U, V] → [U, X], −inf at repeats."""
        selected = rows.gather(-1, self.index)
        return selected if self.repeated is None else selected.masked_fill(self.repeated, -torch.inf)

    def cells(self, logits: Tensor) -> Tensor:
        """Select logits [U, V] and append log Σ exp over the other columns: [U, X + 1].

        The last cell is a sum over the other columns, since 1 − Σ of the chosen ones loses all digits if they hold
        nearly all mass. If every column is chosen, it is near the lowest finite number, whose gradient is 0 and not the
        NaN of −inf.
        """
        return _CellsAndRest.apply(logits, self)


class _CellsAndRest(torch.autograd.Function):
    """Chosen logits and the other columns' log-mass. Saves the latter's p and Σ p; their ratio is the gradient."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Columns) -> Tensor:
        other_p, mass, log_mass = (_split_mass if logits.device.type == "cpu" else _masked_mass)(logits, columns.index)
        ctx.save_for_backward(other_p, mass, columns.index)
        return torch.cat([columns.take(logits), log_mass.to(logits.dtype)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        other_p, mass, index = ctx.saved_tensors
        column_gradient, rest_gradient = grad_output.split([index.shape[-1], 1], -1)
        return scaled(other_p, rest_gradient / mass).scatter_add_(-1, index, column_gradient), None


def without(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over all columns but `index`, int64 [U, X], and log Σ exp of these columns, fp64 [U, 1]."""
    return softmax(logits.scatter(-1, index, torch.finfo(logits.dtype).min))


def _masked_mass(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return p of the other columns, their sum, and log Σ exp of their logits [U, 1]."""
    other_p, log_mass = without(logits, index)
    return other_p, torch.ones_like(log_mass, dtype=logits.dtype), log_mass


def _split_mass(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `_masked_mass` with less memory traffic; the first two results have another common factor.

    Only for CPUs: the number of rows that are recomputed depends on values, so a host would wait for a GPU.
    """
    p, log_sum = softmax(logits)
    other_p = p.scatter_(-1, index, 0)
    mass = other_p.sum(-1, keepdim=True)
    log_mass = log_sum + mass.double().log()
    # If the chosen columns leave so little mass that it loses digits, recompute the other columns on their own.
    faint = (mass < FAINT).squeeze(-1).nonzero().squeeze(-1)
    if len(faint):
        other_p[faint], mass[faint], log_mass[faint] = _masked_mass(logits[faint], index[faint])
    return other_p, mass, log_mass


def log_rest(outside: Tensor) -> Tensor | None:
    """Compute log Σ exp of the columns outside the cells: [U, Y] → [U, 1], or None for Y = 0 (methods.md §3.3).

    A sum over those columns, since 1 − Σ of the cells loses all digits if they hold nearly all mass. If all columns are
    −inf, it is near the lowest finite number, whose gradient is 0 and not the NaN of −inf.
    """
    if not outside.shape[-1]:
        return None
    return log_sum_exp(outside.clamp(min=torch.finfo(outside.dtype).min)).unsqueeze(-1)


def with_rest(log_t: Tensor, log_s: Tensor, rest_t: Tensor | None, rest_s: Tensor | None) -> tuple[Tensor, Tensor]:
    """Append each side's rest [U, 1] to its log-probabilities of cells [U, X] (methods.md §3.3).

    A rest is None if a side has no columns outside the cells. If only one side has such columns, a rest cell could make
    the divergence infinite whatever the student does, so both sides are renormalised without it.
    """
    if rest_t is not None and rest_s is not None:
        return torch.cat([log_t, rest_t], -1), torch.cat([log_s, rest_s], -1)
    if rest_t is None and rest_s is None:
        return log_t, log_s
    return log_t.log_softmax(-1), log_s.log_softmax(-1)


def partial_divergence(divergence: Divergence, log_t: Tensor, log_s: Tensor) -> Tensor:
    """Compute the sum of methods.md §3.1 over cells [U, X] of an incomplete distribution → [U]; may be negative.

    Removes the s − t that `Divergence` adds in each cell, which cancels only over a full distribution.
    """
    excess = (log_s.exp() - log_t.detach().exp()).sum(-1)
    return divergence(log_t, log_s) - divergence.excess_weight * excess


def largest(logits: Tensor, top_k: int) -> Tensor:
    """Find the columns of the `top_k` largest logits: [U, V] → int64 [U, top_k].

    They lie in the `top_k` groups of columns with the largest maxima, which are found recursively, or among the
    leftover columns in no group. On a CPU this takes less than half the time of `topk` on full rows.
    """
    logits = logits.detach()
    num_groups = logits.shape[-1] // _GROUP
    if 2 * top_k > num_groups:
        return logits.topk(top_k, dim=-1, sorted=False).indices
    columns = torch.arange(logits.shape[-1], device=logits.device)
    grouped, ungrouped = columns[: _GROUP * num_groups].view(_GROUP, num_groups), columns[_GROUP * num_groups :]
    maxima = logits[:, : _GROUP * num_groups].unflatten(-1, grouped.shape).amax(1)
    candidates = grouped.t()[largest(maxima, top_k)].flatten(1)
    candidates = torch.cat([candidates, ungrouped.expand(len(candidates), -1)], -1)
    return candidates.gather(-1, logits.gather(-1, candidates).topk(top_k, dim=-1, sorted=False).indices)


def require_whole(teacher: LogitRows, setting: str, why: str) -> None:
    """Raise ConfigError, naming a setting, if the teacher is truncated."""
    if teacher.is_truncated:
        raise ConfigError(
            f"{setting}: {why}, but this teacher gives its likeliest tokens only; change the setting, or build a "
            "cache with --hidden-states or with all tokens (--top-k of the vocabulary's size)"
        )


def require_temperature_1(teacher: LogitRows, temperature: float) -> None:
    """Raise ConfigError for a truncated teacher at a temperature other than 1, since its rest is then unknown."""
    if temperature != 1:
        require_whole(teacher, f"temperature={temperature:g}", "the mass of all tokens changes with it")


def split(teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Split a truncated teacher's columns [U, W + 1] into the vocabulary [U, W] and a rest [U, 1]."""
    return teacher[:, :-1], teacher[:, -1:]


def of_likeliest(teacher: LogitRows, rows: Tensor, log_q: Tensor) -> Tensor:
    """Mask the realised next token if it is not among the k likeliest: log-probabilities [U, W + 1] → [U, W].

    It is stored in any case, but its rank is unknown. All columns that stay finite have known ranks.
    """
    assert isinstance(teacher, SparseLogits)
    return log_q.scatter(1, teacher.next_beyond_likeliest(rows).unsqueeze(1), -torch.inf)[:, :-1]


def joined(*log_masses: Tensor) -> Tensor:
    """Return log Σ exp over all columns of the arguments [U, …], −inf if all are: [U, 1]."""
    return torch.cat(log_masses, 1).logsumexp(1, keepdim=True)


def with_tail_cell(log_t: Tensor, log_s: Tensor, rest_t: Tensor, rest_s: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge the cells that no stored teacher token reaches into a rest cell, per unit: [U, X] → [U, X + 1] each.

    log_t, log_s: log-masses of cells, not normalised. log_t is −inf in unreached cells, both are −inf in cells that a
    unit does not have. rest_t, rest_s: log-masses outside the cells [U, 1]; rest_s is None if the student has none.
    Merged cells become −inf on both sides. If the student has no mass in a rest cell, it is dropped, as its
    divergence would be infinite.
    """
    is_unreached = log_t == -torch.inf
    lowest = torch.finfo(log_s.dtype).min
    # Not −inf: if all cells are reached, the gradient of an empty sum would be NaN.
    unreached = log_sum_exp(log_s.masked_fill(~is_unreached, lowest)).unsqueeze(1)
    is_empty = ~(is_unreached & (log_s > -torch.inf)).any(1, keepdim=True)
    if rest_s is not None:
        is_empty = is_empty & (rest_s == -torch.inf)
        unreached = torch.logaddexp(unreached, rest_s.clamp(min=lowest))
    last_t = rest_t.masked_fill(is_empty, -torch.inf)
    last_s = unreached.masked_fill(is_empty, -torch.inf)
    return torch.cat([log_t, last_t], 1), torch.cat([log_s.masked_fill(is_unreached, -torch.inf), last_s], 1)
