"""Matched tokens cell by cell, the others by rank, at the first position of each aligned chunk (METHODS §5)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.chunk_loss import ChunkInputs, log_rest
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.logit_rows import LogitRows
from nemo_opd.losses.merge import Merge
from nemo_opd.losses.pairs import TokenPairs
from nemo_opd.losses.support import with_rest
from nemo_opd.types import LossOutput

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


def gold(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    merge: str = "first",
    common_weight: float = 1.0,
    uncommon_weight: float = 1.0,
    uncommon_topk: int = 8192,
    sequence_weights: Tensor | None = None,
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> LossOutput:
    """τ² · Σ [common_weight · divergence + uncommon_weight · tail] over chunks / normalizer (METHODS §5), and `kd`.

    divergence: on the exact pairs of the projection and one rest cell for all other tokens of a side; where only one
    side has others, on the pairs alone, renormalised. tail: Σ_r |p_r − q_r| over the `uncommon_topk` most likely of
    those others, each side sorted by probability, the shorter padded with 0. p and q are taken at the rows before a
    chunk's first tokens; merge=mean, for parity: they are geometric means over the rows of all its tokens. Unshifted
    logits [B, S, V] and [B, T, W]; ids and chunk ids [B, S] and [B, T], chunk ids −1 or non-decreasing; a chunk with
    token 0 of either side is no unit. sequence_weights [B]: of each sequence's units in the sum; those of weight 0 are
    left out. Vocabulary sizes default to the projection's. normalizer: units of the global batch, by default of this
    call. chunk_size: units computed at a time, by default what fits a byte budget. Raises ConfigError for shapes,
    sizes, weights or names that do not fit, ProjectionError for a projection without exact pairs.
    """
    how = Merge(merge)
    compare = PairedDivergence(
        Divergence(divergence, beta, mixed_weight), common_weight, uncommon_weight, uncommon_topk
    )
    inputs = ChunkInputs.of(
        student_logits,
        teacher_logits,
        student_ids=student_ids,
        teacher_ids=teacher_ids,
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
        temperature=temperature,
        sequence_weights=sequence_weights,
        projection=projection,
        student_vocab_size=student_vocab_size,
        teacher_vocab_size=teacher_vocab_size,
    )
    pairs = TokenPairs.exact(projection, inputs.student_size, inputs.teacher_size, inputs.device)
    return paired_loss(inputs, pairs, compare, how, normalizer=normalizer, chunk_size=chunk_size)


@dataclass(frozen=True, slots=True)
class PairedDivergence:
    """How two vocabularies compare, some tokens of which are matched."""

    divergence: Divergence
    common_weight: float
    uncommon_weight: float
    uncommon_topk: int
    """Tokens of no pair whose probabilities are compared by rank, on either side."""

    def __post_init__(self) -> None:
        for key, weight in (("common_weight", self.common_weight), ("uncommon_weight", self.uncommon_weight)):
            if not weight >= 0:
                raise ConfigError(f"{key}={weight}: a term that is maximised teaches nothing; give 0 or more")
        if self.uncommon_topk < 1:
            raise ConfigError(
                f"uncommon_topk={self.uncommon_topk}: it is a number of tokens; give 1 or more, "
                "or uncommon_weight=0 to leave that term out"
            )

    def __call__(self, student: Tensor, teacher: Tensor, pairs: TokenPairs) -> Tensor:
        """Logits/τ [U, V] and [U, W] → [U]."""
        log_p = _Split.of(student, pairs.student, pairs.student_rest)
        log_q = _Split.of(teacher, pairs.teacher, pairs.teacher_rest)
        cells_q, cells_p = with_rest(log_q.paired, log_p.paired, log_rest(log_q.others), log_rest(log_p.others))
        common = self.common_weight * self.divergence(cells_q, cells_p)
        if not self.uncommon_weight:
            return common
        tails = (side.largest(self.uncommon_topk) for side in (log_q, log_p))
        return common + self.uncommon_weight * _sorted_l1(*tails)


def paired_loss(
    inputs: ChunkInputs,
    pairs: TokenPairs,
    compare: PairedDivergence,
    merge: Merge,
    *,
    normalizer: float | None,
    chunk_size: int | None,
) -> LossOutput:
    """τ² · Σ compare of merged chunks / normalizer, and the metric `kd`."""

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        return compare(student, teacher, pairs)

    return merge.loss(
        inputs,
        unit_loss,
        cells_per_unit=_cells_per_unit(inputs, pairs, compare),
        normalizer=normalizer,
        chunk_size=chunk_size,
    )


def _cells_per_unit(inputs: ChunkInputs, pairs: TokenPairs, compare: PairedDivergence) -> int:
    """fp32 numbers alive per unit at the peak of a chunk."""
    others = 5 * len(pairs.student_rest) + 3 * len(pairs.teacher_rest)
    tails = min(len(pairs.student_rest), compare.uncommon_topk) + min(len(pairs.teacher_rest), compare.uncommon_topk)
    return 6 * inputs.student_size + 4 * inputs.teacher_size + others + 10 * len(pairs) + 6 * tails


@dataclass(frozen=True, slots=True)
class _Split:
    """Log-probabilities over a whole vocabulary, apart."""

    paired: Tensor
    """[U, X]"""
    others: Tensor
    """[U, V − X]"""

    @staticmethod
    def of(logits: Tensor, paired: Tensor, others: Tensor) -> _Split:
        # Not logits − logsumexp: at logits of 150 that rounds log-probabilities near 0 to 1e-5.
        log_p = logits.log_softmax(-1)
        return _Split(log_p.index_select(1, paired), log_p.index_select(1, others))

    def largest(self, top_k: int) -> Tensor:
        """Probabilities of the most likely others [U, min(top_k, V − X)], in descending order."""
        return self.others.topk(min(top_k, self.others.shape[-1]), dim=-1).values.exp()


def _sorted_l1(q: Tensor, p: Tensor) -> Tensor:
    """Σ |q − p| over ranks, the shorter side padded with 0: [U, X] and [U, Y] → [U]."""
    num_ranks = max(q.shape[-1], p.shape[-1])
    difference = F.pad(p, (0, num_ranks - p.shape[-1])) - F.pad(q, (0, num_ranks - q.shape[-1]))
    return difference.abs().sum(-1)
