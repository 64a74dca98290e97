"""Matched tokens compared cell by cell, others by rank, at each chunk's first position (methods.md §5.4, §5.5)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import GradientSink, UnitRows
from nemo_opd.losses.arguments import check_compat, fixed_by
from nemo_opd.losses.cells import add_comparison_of_pairs
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.chunk_merge import Merge, chunk_loss
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.fused import fused, softmax, taken_once
from nemo_opd.losses.learned_projection import LearnedProjection
from nemo_opd.losses.sparse_projection import TokenPairs
from nemo_opd.losses.support import (
    joined,
    log_rest,
    of_likeliest,
    partial_divergence,
    split,
    with_rest,
    with_tail_cell,
)

if TYPE_CHECKING:
    from nemo_opd.losses.learned_projection import LearnedShares
    from nemo_opd.projection import ProjectionMatrix

_UNCOMMON_TOPK = 8192


@Loss
def gold(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    merge: str | None = None,
    common_weight: float | None = None,
    uncommon_weight: float | None = None,
    uncommon_topk: int | None = None,
    continuation_weight: float = 0.0,
    compat: str | None = None,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ [common_weight · divergence + uncommon_weight · tail] / normalizer, and `kd` (methods.md §5.4).

    divergence: on the projection's exact pairs and one rest cell for a side's unpaired tokens; if only one side has
    unpaired tokens, on the pairs alone, renormalised. tail: Σ_r |p_r − q_r| over the `uncommon_topk` (8192) most likely
    unpaired tokens, each side sorted by probability, the shorter padded with 0. p and q are taken at the rows that
    predict a chunk's first tokens. For parity, merge=mean takes geometric means over the rows of all tokens of a chunk;
    merge=observed multiplies by the probabilities of the chunk's later tokens and compares without rest cell or
    renormalisation. Weights are 1 by default. continuation_weight: factor of the `alm` term of chunks with several
    tokens on a side. compat="nemo_rl": merge mean, pairs compared as with observed, both tails cut to the shorter.
    compat="trl": merge observed, full tails, default weights M for pairs and 1 − M for tails, M being the paired share
    of the teacher's vocabulary, and no factor τ². Raises ConfigError for shapes, sizes, weights or names that do not
    fit, ProjectionError for a projection without exact pairs.
    """
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    return _paired_loss(
        inputs,
        TokenPairs.exact(projection, inputs.student_size, inputs.teacher_size, inputs.device),
        Divergence(divergence, beta, mixed_weight),
        _PairedOptions(merge, common_weight, uncommon_weight, uncommon_topk, continuation_weight, compat),
    )


@Loss
def h_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix | LearnedProjection,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    merge: str | None = None,
    common_weight: float | None = None,
    uncommon_weight: float | None = None,
    uncommon_topk: int | None = None,
    continuation_weight: float = 0.0,
    compat: str | None = None,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute `gold` on the pairs {(s, argmax_t R[s, t])} of weight ≥ 0.6, and `kd` (methods.md §5.5).

    Arguments as for `gold`. If several student tokens claim a teacher token, an exact row wins, then the higher weight,
    then the lower id. A `LearnedProjection` as `projection` gets a gradient too: its pairs come from R₀, and the
    student token of a learned row gives R_st p_s to its pair's cell and (1 − R_st) p_s to the rest cell (methods.md
    §2.8). Raises ConfigError for shapes, sizes, weights or names that do not fit, ProjectionError for a projection
    without such pairs, or if no learned row is in a pair.
    """
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    learned = projection if isinstance(projection, LearnedProjection) else None
    matrix = projection.start if isinstance(projection, LearnedProjection) else projection
    within = inputs.student_size, inputs.teacher_size, inputs.device
    return _paired_loss(
        inputs,
        TokenPairs.relaxed(matrix, *within),
        Divergence(divergence, beta, mixed_weight),
        _PairedOptions(merge, common_weight, uncommon_weight, uncommon_topk, continuation_weight, compat),
        None if learned is None else learned.shares(*within),
    )


def _paired_loss(
    inputs: ChunkInputs,
    pairs: TokenPairs,
    divergence: Divergence,
    options: _PairedOptions,
    shares: LearnedShares | None = None,
) -> PlannedLoss:
    """Plan `gold` on any pairs. shares: learned shares of some pairs' student tokens."""
    compare = options.comparison(divergence, pairs, shares)

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        if not inputs.is_truncated:
            return compare(student, teacher)
        log_q = teacher.log_softmax(-1)
        ranked = of_likeliest(inputs.teacher, inputs.units.teacher_rows[part], log_q)
        return compare.truncated(student.log_softmax(-1), *split(log_q), ranked)

    term = options.merges.term(
        inputs,
        unit_loss,
        cells_per_unit=_cells_per_unit(inputs, compare),
        compare_onto=compare.onto if compare.has_closed_form else None,
    )
    if shares is not None:
        term = replace(term, learned=shares.log_shares)
    if options.compat == "trl":  # TRL does not scale by τ².
        term = term.times(inputs.temperature**-2)
    return chunk_loss(inputs, term, continuation_weight=options.continuation_weight)


@dataclass(frozen=True, slots=True)
class _PairedOptions:
    """Options of `gold` and `h_kl`; None means the default."""

    merge: str | None
    common_weight: float | None
    uncommon_weight: float | None
    uncommon_topk: int | None
    continuation_weight: float
    compat: str | None

    def __post_init__(self) -> None:
        check_compat(self.compat, ("nemo_rl", "trl"))
        for key in ("common_weight", "uncommon_weight"):
            weight = getattr(self, key)
            if weight is not None and not weight >= 0:
                raise ConfigError(f"{key}={weight} would maximise the term; give 0 or more")
        if self.common_weight == self.uncommon_weight == self.continuation_weight == 0:
            raise ConfigError("common_weight=0 and uncommon_weight=0: nothing is learned; raise one of them")
        if self.uncommon_topk is not None and self.uncommon_topk < 1:
            raise ConfigError(
                f"uncommon_topk={self.uncommon_topk} leaves no token to compare; give 1 or more, "
                "or uncommon_weight=0 to turn that term off"
            )

    @property
    def merges(self) -> Merge:
        preset = {"nemo_rl": "mean", "trl": "observed"}.get(self.compat or "", "first")
        return Merge(fixed_by(self.compat, "merge", self.merge, preset, "first"))

    def comparison(self, divergence: Divergence, pairs: TokenPairs, shares: LearnedShares | None) -> _PairedDivergence:
        """Build the comparison. compat=trl weighs pairs by their share M of the teacher's tokens, tails by 1 − M."""
        paired_share = len(pairs) / (len(pairs) + len(pairs.teacher_rest)) if self.compat == "trl" else None
        shorter = min(len(pairs.student_rest), len(pairs.teacher_rest))
        num_ranks = max(len(pairs.student_rest), len(pairs.teacher_rest)) if self.compat == "trl" else _UNCOMMON_TOPK
        num_ranks = num_ranks if self.uncommon_topk is None else self.uncommon_topk
        return _PairedDivergence(
            divergence,
            pairs,
            shares,
            common_weight=_first_set(self.common_weight, paired_share, 1.0),
            uncommon_weight=_first_set(self.uncommon_weight, None if paired_share is None else 1 - paired_share, 1.0),
            num_ranks=min(num_ranks, shorter) if self.compat == "nemo_rl" else num_ranks,
            is_distribution=self.compat is None and self.merges.kind != "observed",
        )


def _first_set(*values: float | None) -> float:
    return next(value for value in values if value is not None)


@dataclass(frozen=True, slots=True)
class _PairedDivergence:
    """Comparison of two vocabularies with some matched tokens."""

    divergence: Divergence
    pairs: TokenPairs
    shares: LearnedShares | None
    """Shares of pairs with learned weights, or None if no weight is learned."""
    common_weight: float
    uncommon_weight: float
    num_ranks: int
    """Unpaired tokens of each side whose probabilities are compared by rank."""
    is_distribution: bool
    """Whether to normalise inputs and add a rest cell; otherwise inputs are compared as they are, on pairs only."""

    def __call__(self, student: Tensor, teacher: Tensor) -> Tensor:
        """Compare logits/τ or log-probabilities [U, V] and [U, W] → [U]."""
        if self.is_distribution:
            # Not logits − logsumexp: for logits of 150 it rounds log-probabilities near 0 to 1e-5.
            student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        log_p = _Split.of(student, self.pairs.student, self.pairs.student_rest, self.shares)
        log_q = _Split.of(teacher, self.pairs.teacher, self.pairs.teacher_rest)
        if self.is_distribution:
            common = self.divergence(*with_rest(log_q.paired, log_p.paired, log_q.rest, log_p.rest))
        else:
            common = partial_divergence(self.divergence, log_q.paired, log_p.paired)
        if not self.uncommon_weight:
            return self.common_weight * common
        tails = (side.largest(self.num_ranks) for side in (log_q, log_p))
        return self.common_weight * common + self.uncommon_weight * _by_rank(*tails).abs().sum(-1)

    def truncated(self, student: Tensor, log_q: Tensor, rest_q: Tensor, ranked: Tensor) -> Tensor:
        """Compare log-probabilities [U, V] with a truncated teacher's log_q [U, W] and rest_q [U, 1] → [U].

        Unpaired tokens and pairs whose teacher token is not stored go into the rest cell. Tails are compared only at
        ranks known from the finite columns of `ranked`, [U, W].
        """
        p = _Split.of(student, self.pairs.student, self.pairs.student_rest, self.shares)
        q = _Split.of(log_q, self.pairs.teacher, self.pairs.teacher_rest)
        # As in `with_rest`, a rest cell that only one side can fill is dropped.
        has_rest = p.rest is not None and q.unpaired.shape[-1]
        rests = (joined(rest_q, q.unpaired), p.rest) if has_rest else (rest_q, None)
        common = self.divergence.of_logits(*with_tail_cell(q.paired, p.paired, *rests))
        if not self.uncommon_weight:
            return self.common_weight * common
        q = replace(q, unpaired=ranked.index_select(1, self.pairs.teacher_rest))
        num_known = (q.unpaired > -torch.inf).sum(-1, keepdim=True)
        differences = _by_rank(*(side.largest(self.num_ranks) for side in (q, p))).abs()
        ranks = torch.arange(differences.shape[-1], device=differences.device)
        is_compared = (ranks < num_known) | (num_known == q.unpaired.shape[-1])
        tail = differences.masked_fill(~is_compared, 0).sum(-1)
        return self.common_weight * common + self.uncommon_weight * tail

    @property
    def has_closed_form(self) -> bool:
        has_rest = len(self.pairs.student_rest) and len(self.pairs.teacher_rest)
        return self.is_distribution and self.shares is None and bool(has_rest)

    def onto(self, student: UnitRows, teacher: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        """Compare logits/τ of units → [u], and add the gradient to `onto`."""
        student, teacher = taken_once(student), taken_once(teacher)
        arguments = self.pairs, self.divergence, True, onto, self.common_weight
        if not self.uncommon_weight:
            return self.common_weight * add_comparison_of_pairs(student, teacher, *arguments)
        p, columns = _largest(student, self.pairs.student_rest, self.num_ranks)
        q, _ = _largest(teacher, self.pairs.teacher_rest, self.num_ranks)
        difference = _by_rank(q.to(p.dtype), p)
        sign = difference[:, : p.shape[1]].sign().to(torch.int8)
        slopes = sign.new_zeros(len(p), student.of_block.shape[1]).scatter_(1, columns, sign)
        common = add_comparison_of_pairs(student, teacher, *arguments, (slopes, self.uncommon_weight))
        return self.common_weight * common + self.uncommon_weight * difference.abs().sum(-1)


def _cells_per_unit(inputs: ChunkInputs, compare: _PairedDivergence) -> int:
    """Count fp32 numbers per unit at the memory peak of a block."""
    pairs, ranks = compare.pairs, compare.num_ranks
    num_learned = 0 if compare.shares is None else len(compare.shares.pairs)
    unpaired = 5 * (len(pairs.student_rest) + num_learned) + 3 * len(pairs.teacher_rest)
    tails = min(len(pairs.student_rest), ranks) + min(len(pairs.teacher_rest), ranks)
    return 6 * inputs.student_size + 4 * inputs.teacher_size + unpaired + 10 * len(pairs) + 6 * tails


@dataclass(frozen=True, slots=True)
class _Split:
    """Log-probabilities of a vocabulary, split into paired and unpaired tokens."""

    paired: Tensor
    """[U, X]"""
    unpaired: Tensor
    """[U, V − X]"""
    remainder: Tensor | None = None
    """[U, m]: mass that tokens of learned pairs do not give to their pair, or None if no pair is learned."""

    @staticmethod
    def of(log_p: Tensor, paired: Tensor, unpaired: Tensor, shares: LearnedShares | None = None) -> _Split:
        paired_log_p, remainder = log_p.index_select(1, paired), None
        if shares is not None:
            paired_log_p, remainder = shares.split(paired_log_p)
        return _Split(paired_log_p, log_p.index_select(1, unpaired), remainder)

    @property
    def rest(self) -> Tensor | None:
        """Log-mass outside the pairs [U, 1], or None if every token is in a pair."""
        return log_rest(self.unpaired if self.remainder is None else torch.cat([self.unpaired, self.remainder], 1))

    def largest(self, top_k: int) -> Tensor:
        """Return the probabilities of the likeliest unpaired tokens [U, min(top_k, V − X)], in descending order."""
        return self.unpaired.topk(min(top_k, self.unpaired.shape[-1]), dim=-1).values.exp()


def _by_rank(q: Tensor, p: Tensor) -> Tensor:
    """Compute p − q rank by rank, the shorter side padded with 0: [U, X] and [U, Y] → [U, max(X, Y)]."""
    num_ranks = max(q.shape[-1], p.shape[-1])
    return F.pad(p, (0, num_ranks - p.shape[-1])) - F.pad(q, (0, num_ranks - q.shape[-1]))


def _largest(rows: UnitRows, tokens: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Return probabilities, in descending order, and ids of the likeliest of `tokens` [Y]: [U, min(top_k, Y)] each."""
    largest = rows.gather().index_select(1, tokens).topk(min(top_k, len(tokens)), dim=-1)
    return (largest.values - _log_sum(rows)).exp().to(largest.values.dtype), tokens[largest.indices]


@fused
def _log_sum(rows: UnitRows) -> Tensor:
    """Return log Σ exp of logits/τ, float64 [U, 1]."""
    return softmax.function(rows.gather())[1]
