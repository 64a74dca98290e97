"""Supports of comparisons, and the mass outside them (methods.md §3.3)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.errors import ConfigError
from nemo_opd.logits.saved import scaled
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.softmax import log_sum_exp, softmax

_SUPPORTS = ("full", "teacher_topk", "student_topk", "union")
_NORMALIZATIONS = ("full", "support", "rest")
FAINT = 1e-20
"""A probability below which that of one token may be no normal fp32 number any more."""
_GROUP = 8
"""Columns that go by one maximum where the largest are searched for."""


@dataclass(frozen=True, slots=True)
class Support:
    """Which columns of a vocabulary are compared, chosen unit by unit."""

    kind: str = "full"
    """full: every column; teacher_topk, student_topk: the `top_k` likeliest of that side; union: those of either."""
    top_k: int | None = None
    """Every column where there are no more than that."""
    normalization: str = "rest"
    """rest, support or full, which are all the same where every column is chosen.

    rest: probabilities over the vocabulary, with one more cell for the mass that each side has elsewhere. From 0, where
    all cells agree, to the divergence over the vocabulary.
    support: probabilities renormalised on the chosen columns, for parity with systems that do so: nothing is learnt
    about the mass elsewhere.
    full: probabilities over the vocabulary, summed over the chosen columns only, likewise for parity: the sum may be
    negative, and forward and reverse KL have a gradient even where student and teacher are equal.
    """

    def __post_init__(self) -> None:
        for key, value, choices in (
            ("support", self.kind, _SUPPORTS),
            ("normalization", self.normalization, _NORMALIZATIONS),
        ):
            if value not in choices:
                raise ConfigError(f"{key}={value!r}: there is no such {key}; choose from {', '.join(choices)}")
        if self.kind == "full" and self.top_k is not None:
            raise ConfigError(
                f"top_k={self.top_k}: support=full takes every column; choose another support, or leave top_k out"
            )
        if self.kind != "full" and self.top_k is None:
            raise ConfigError(f"support={self.kind} needs top_k; give the number of columns to take from a side")
        if self.top_k == 1 and self.normalization == "support" and self.kind != "union":
            raise ConfigError(
                "top_k=1 with normalization=support: one column renormalised is 1 on both sides, and nothing is "
                "learned; give a larger number, or normalization=rest"
            )
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(f"top_k={self.top_k}: a support has at least 1 column; give a larger number")

    def compare(self, divergence: Divergence, teacher_logits: Tensor, student_logits: Tensor) -> Tensor:
        """Compare units, in nats: logits/τ [U, V] of teacher and student → [U] (methods.md §3.3).

        The choice of columns is a constant, and so is the teacher.
        """
        if self.takes_all(student_logits.shape[-1]):
            return divergence.of_logits(teacher_logits, student_logits)
        chosen = self.choose(teacher_logits, student_logits)
        if self.normalization == "support":
            return divergence.of_logits(chosen.take(teacher_logits), chosen.take(student_logits))
        cells_t, cells_s = chosen.cells(teacher_logits), chosen.cells(student_logits)
        if self.normalization == "rest":
            return divergence.of_logits(cells_t, cells_s)
        return partial_divergence(divergence, cells_t.log_softmax(-1)[:, :-1], cells_s.log_softmax(-1)[:, :-1])

    def takes_all(self, num_columns: int) -> bool:
        return self.top_k is None or self.top_k >= num_columns

    def num_cells(self, num_columns: int) -> int:
        """Return the largest number of cells that a unit of that many columns has."""
        if self.top_k is None or self.takes_all(num_columns):
            return num_columns
        return (2 if self.kind == "union" else 1) * self.top_k + 1

    def choose(self, teacher_logits: Tensor, student_logits: Tensor) -> Columns:
        """Choose the columns of each unit: logits [U, V] of both sides; `top_k` is less than V."""
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
    """Columns of each unit."""

    index: Tensor
    """int64 [U, X]"""
    repeated: Tensor | None = None
    """bool [U, X]: the column stands earlier in its row, so that this one is no cell; None: nowhere."""

    @staticmethod
    def union(first: Tensor, second: Tensor, num_columns: int) -> Columns:
        """Join indices [U, X] and [U, Y], each without repeats in a row, into rows of `num_columns`."""
        in_first = torch.zeros(len(first), num_columns, dtype=torch.bool, device=first.device).scatter_(1, first, True)
        repeated = torch.cat([torch.zeros_like(first, dtype=torch.bool), in_first.gather(1, second)], 1)
        return Columns(torch.cat([first, second], 1), repeated)

    def take(self, rows: Tensor) -> Tensor:
        """Select logits or log-probabilities: [U, V] → [U, X], −inf in a repeat."""
        taken = rows.gather(-1, self.index)
        return taken if self.repeated is None else taken.masked_fill(self.repeated, -torch.inf)

    def cells(self, logits: Tensor) -> Tensor:
        """Map logits [U, V] to those of the columns taken, and log Σ exp over the others: [U, X + 1].

        The last is a sum over the others, since 1 − Σ of those taken has no digit left where they hold nearly all mass.
        In a row with every column taken it is about the lowest finite number, whose gradient is 0 and not the NaN of
        −inf.
        """
        return _CellsAndRest.apply(logits, self)


class _CellsAndRest(torch.autograd.Function):
    """Saves p of the other columns, and Σ of it: with respect to the logits the gradient of the rest is their ratio."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, columns: Columns) -> Tensor:
        others, mass, log_mass = (_parted if logits.device.type == "cpu" else _without)(logits, columns.index)
        ctx.save_for_backward(others, mass, columns.index)
        return torch.cat([columns.take(logits), log_mass.to(logits.dtype)], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        others, mass, index = ctx.saved_tensors
        of_columns, of_rest = grad_output.split([index.shape[-1], 1], -1)
        return scaled(others, of_rest / mass).scatter_add_(-1, index, of_columns), None


def without(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax over the columns other than `index`, int64 [U, X], and log Σ exp of these, [U, 1] in fp64."""
    return softmax(logits.scatter(-1, index, torch.finfo(logits.dtype).min))


def _without(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    others, log_mass = without(logits, index)
    return others, torch.ones_like(log_mass, dtype=logits.dtype), log_mass


def _parted(logits: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return what `_without` does, up to a factor of the first two, with less traffic.

    How many rows are looked at again is in their values, for which a host would wait.
    """
    p, log_sum = softmax(logits)
    others = p.scatter_(-1, index, 0)
    mass = others.sum(-1, keepdim=True)
    log_mass = log_sum + mass.double().log()
    # Where the columns taken leave so little that it loses digits, the others are looked at on their own.
    faint = (mass < FAINT).squeeze(-1).nonzero().squeeze(-1)
    if len(faint):
        others[faint], mass[faint], log_mass[faint] = _without(logits[faint], index[faint])
    return others, mass, log_mass


def log_rest(others: Tensor) -> Tensor | None:
    """Compute log Σ exp of the columns beyond the cells: [U, Y] → [U, 1]; None for Y = 0 (methods.md §3.3).

    A sum over those columns, since 1 − Σ of the cells has no digit left where they hold nearly all mass. Where all are
    −inf it is about the lowest finite number, whose gradient is 0 and not the NaN of −inf.
    """
    if not others.shape[-1]:
        return None
    return log_sum_exp(others.clamp(min=torch.finfo(others.dtype).min)).unsqueeze(-1)


def with_rest(log_t: Tensor, log_s: Tensor, rest_t: Tensor | None, rest_s: Tensor | None) -> tuple[Tensor, Tensor]:
    """Join log-probabilities of cells [U, X] and of the rest [U, 1], on either side (methods.md §3.3).

    None: a side without columns beyond the cells. Where only one side has some, a rest cell would make divergences
    infinite whatever the student does, so both sides are renormalised without it.
    """
    if rest_t is not None and rest_s is not None:
        return torch.cat([log_t, rest_t], -1), torch.cat([log_s, rest_s], -1)
    if rest_t is None and rest_s is None:
        return log_t, log_s
    return log_t.log_softmax(-1), log_s.log_softmax(-1)


def partial_divergence(divergence: Divergence, log_t: Tensor, log_s: Tensor) -> Tensor:
    """Compute the sum of methods.md §3.1 over cells [U, X] that are not all of a distribution → [U]; may be negative.

    What `Divergence` adds of s − t in each cell is nothing in sum over a whole distribution, and taken out again here.
    """
    excess = (log_s.exp() - log_t.detach().exp()).sum(-1)
    return divergence(log_t, log_s) - divergence.excess_weight * excess


def largest(logits: Tensor, top_k: int) -> Tensor:
    """Find the columns of the `top_k` largest logits: [U, V] → int64 [U, top_k].

    They are in the `top_k` groups of columns with the largest maxima, or among the columns that no group has; which
    groups is found the same way. On a CPU it takes less than half the time of a search through the whole row.
    """
    logits = logits.detach()
    num_groups = logits.shape[-1] // _GROUP
    if 2 * top_k > num_groups:
        return logits.topk(top_k, dim=-1, sorted=False).indices
    columns = torch.arange(logits.shape[-1], device=logits.device)
    grouped, others = columns[: _GROUP * num_groups].view(_GROUP, num_groups), columns[_GROUP * num_groups :]
    maxima = logits[:, : _GROUP * num_groups].unflatten(-1, grouped.shape).amax(1)
    candidates = grouped.t()[largest(maxima, top_k)].flatten(1)
    candidates = torch.cat([candidates, others.expand(len(candidates), -1)], -1)
    return candidates.gather(-1, logits.gather(-1, candidates).topk(top_k, dim=-1, sorted=False).indices)
