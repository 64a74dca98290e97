"""The rule of each aggregation type (methods.md §6), and the scores that rules compare: confidence of teachers in
sequences, in bits per byte, and the overlap of likeliest tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from nemo_opd.config.objective import (
    Aggregation,
    AggregationBase,
    AveragedLogits,
    Routed,
    Score,
    SelectTeacher,
    WeightedSum,
)
from nemo_opd.config.settings import choices, require_lines
from nemo_opd.data.collate import mask_unrouted
from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.logits.blocks import local_parts
from nemo_opd.logits.blockwise import compute_dtype
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows, SparseLogits, SparseRows, logit_rows
from nemo_opd.logits.term import unit_cells
from nemo_opd.losses.arguments import check_positions, count_label_tokens, label_rows, next_tokens, own_columns
from nemo_opd.losses.logit_metrics import STRIDE, plan_chunk_overlap, plan_overlap
from nemo_opd.losses.policy_gradient import confidence_weights
from nemo_opd.types import Batch, Mean, SampledRows, SequenceScores, TeacherRows, TokenRows

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_LIVE_COPIES = 4
"""Peak number of live tensors the size of a chunk."""

TokenScore = Score | Literal["log_probability"]
"""log_probability: log-probability of every scored token, including tokens without text; see `mean_logprob`."""


def _surprisal(log_p: Tensor, targets: Tensor) -> Tensor:
    return -log_p.gather(1, targets[:, None]).squeeze(1)


NATS: dict[TokenScore, Callable[[Tensor, Tensor], Tensor]] = {
    "bits_per_byte": _surprisal,
    "log_probability": _surprisal,
    "entropy": lambda log_p, targets: torch.special.entr(log_p.exp()).sum(1),
    "max_probability": lambda log_p, targets: -log_p.amax(1),
}
"""Log-probabilities [U, W] and tokens [U] → [U]."""
_SPARSE_NATS: dict[TokenScore, Callable[[SparseRows], Tensor]] = {
    "bits_per_byte": lambda rows: -rows.log_p_next,
    "log_probability": lambda rows: -rows.log_p_next,
    "entropy": lambda rows: rows.entropy,
    "max_probability": lambda rows: -rows.log_p[:, 0],
}
"""The same for truncated logits, whose values still refer to the whole vocabulary."""
require_lines(get_args(Score), NATS, "NATS in nemo_opd/aggregation/rules.py")
require_lines(NATS, _SPARSE_NATS, "_SPARSE_NATS in nemo_opd/aggregation/rules.py")


def sequence_scores(
    logits_BTW: Tensor | LogitRows, tokens: TokenRows, *, score: TokenScore, vocab_size: int
) -> SequenceScores:
    """Sum a teacher's bits and bytes of each sequence over the scored tokens that carry text (methods.md §6.1).

    Bits of a token: −log2 p(token) (bits_per_byte), the entropy of p (entropy), or −log2 of the largest probability
    (max_probability). log_probability: −log2 p(token), also over scored tokens without text. Logits [B, T, W] are
    unshifted; only the first `vocab_size` columns count, and at most a chunk of them is in fp32. Raises ConfigError
    for shapes or sizes that do not fit.
    """
    counted = _counted(tokens, score)
    nats = token_nats(logits_BTW, tokens, score=score, vocab_size=vocab_size)
    num_bytes = torch.where(counted, tokens.num_bytes, 0)[:, 1:].sum(1)
    return SequenceScores(nats.sum(1) / math.log(2), num_bytes.long(), count_label_tokens(counted))


def _counted(tokens: TokenRows, score: TokenScore) -> Tensor:
    """Return a mask of the tokens that count towards the score: bool [B, T]."""
    if score == "log_probability":
        return tokens.loss_mask
    return compute_on_host(lambda mask, num_bytes: [mask & (num_bytes > 0)], tokens.loss_mask, tokens.num_bytes)[0]


def token_nats(logits_BTW: Tensor | LogitRows, tokens: TokenRows, *, score: TokenScore, vocab_size: int) -> Tensor:
    """Return the nats per token that `sequence_scores` sums, 0 for tokens it skips: float64 [B, T]."""
    counted = _counted(tokens, score)
    return nats_by_score(logits_BTW, tokens, counted, [score], vocab_size=vocab_size)[0]


def nats_by_score(
    logits_BTW: Tensor | LogitRows,
    tokens: TokenRows,
    counted: Tensor,
    scores: Sequence[TokenScore],
    *,
    vocab_size: int,
) -> Tensor:
    """Compute several scores of the counted tokens in one pass, 0 elsewhere: nats, float64 [scores, B, T].

    counted: bool [B, T].
    """
    teacher = logit_rows(logits_BTW)
    check_positions(teacher.shape, ids=tokens.ids)
    size = own_columns("vocab_size", vocab_size, teacher.shape[-1], teacher.shape[-1])
    rows = label_rows(counted)
    targets = next_tokens(tokens.ids, rows)
    # One element per token, so that sums do not depend on a device's order of additions.
    nats = torch.zeros(len(scores), tokens.ids.numel(), dtype=torch.float64, device=teacher.device)
    for part in local_parts(teacher, unit_cells(len(rows), _LIVE_COPIES * size)):
        if isinstance(teacher, SparseLogits):
            sparse = teacher.known(rows[part])
            values = [_SPARSE_NATS[score](sparse) for score in scores]
        else:
            log_p = teacher.read(rows[part], size).to(compute_dtype(teacher)).log_softmax(1)
            values = [NATS[score](log_p, targets[part]) for score in scores]
        for score_nats, part_nats in zip(nats, values, strict=True):
            score_nats[rows[part] + 1] = part_nats.double()
    return teacher.reduce(nats).view(len(scores), *tokens.ids.shape)


def joined_scores(parts: Sequence[SequenceScores], is_real: Tensor | None = None) -> SequenceScores:
    """Concatenate scores of consecutive sequences on the host. is_real: bool, false for padding, which is dropped."""
    bits, num_bytes, num_tokens = torch.stack(
        [torch.cat(tensors).double() for tensors in zip(*map(score_tensors, parts), strict=True)]
    ).cpu()  # a single blocking copy
    joined = bits, num_bytes.long(), num_tokens.long()
    return SequenceScores(*(tensor if is_real is None else tensor[is_real] for tensor in joined))


def score_tensors(scores: SequenceScores) -> tuple[Tensor, Tensor, Tensor]:
    """Return the fields in declaration order."""
    return scores.bits, scores.num_bytes, scores.num_tokens


def bits_per_byte(scores: Sequence[SequenceScores]) -> Tensor:
    """Divide bits by bytes: float64 [teachers, B]; +inf for a sequence without a scored byte of the teacher."""
    bits = torch.stack([score.bits for score in scores])
    num_bytes = torch.stack([score.num_bytes for score in scores])
    return torch.where(num_bytes > 0, bits / num_bytes.clamp(min=1), torch.inf)


def mean_logprob(scores: SequenceScores) -> Tensor:
    """Compute the teacher's mean log-probability per token, in nats: float64 [B]; −inf without a scored token.

    scores: computed with score="log_probability".
    """
    nats = scores.bits.double() * math.log(2)
    return torch.where(scores.num_tokens > 0, -nats / scores.num_tokens.clamp(min=1), -torch.inf)


def gap(with_context: SequenceScores, without_context: SequenceScores) -> Mean:
    """Compute the mean of log q(y | context) − log q(y) over response tokens, in nats.

    Both scores are "log_probability". Sequences that the teacher's maximum length cuts at different tokens are skipped.
    """
    is_same = with_context.num_tokens == without_context.num_tokens
    nats = (without_context.bits - with_context.bits)[is_same].sum() * math.log(2)
    return Mean(float(nats), int(with_context.num_tokens[is_same].sum()))


@dataclass(frozen=True, slots=True)
class Overlap:
    """The `overlap` metric of one teacher and the student."""

    projection: ProjectionMatrix | None
    """None if they share a tokenizer."""
    student_vocab_size: int
    teacher_vocab_size: int

    @staticmethod
    def across(projection: ProjectionMatrix | None, student_vocab_size: int, teacher_vocab_size: int) -> Overlap | None:
        """Return the metric for a teacher with another tokenizer, or None if the two have no token in common."""
        if projection is None or not len(projection.shared_pairs):
            return None
        return Overlap(projection, student_vocab_size, teacher_vocab_size)

    def plan(
        self,
        student_logits: Tensor | LogitRows,
        teacher_logits: LogitRows,
        student: TokenRows,
        teacher: TeacherRows,
        sampled: SampledRows | None,
    ) -> PlannedLoss:
        """Plan the metric `overlap` of the sampled rows, or of all if `sampled` is None.

        student: the student's tokens that this teacher is compared on.
        """
        is_sampled = () if sampled is None else (sampled.is_sampled,)
        if teacher.chunks is None:
            (mask,) = compute_on_host(_strided_mask, student.loss_mask, *is_sampled)
            return plan_overlap(
                student_logits,
                teacher_logits,
                mask=mask,
                student_vocab_size=self.student_vocab_size,
                teacher_vocab_size=self.teacher_vocab_size,
            )
        assert self.projection is not None
        (chunks,) = compute_on_host(_strided_chunks, teacher.chunks.student, *is_sampled)
        return plan_chunk_overlap(
            student_logits,
            teacher_logits,
            projection=self.projection,
            student_ids=student.ids,
            teacher_ids=teacher.tokens.ids,
            student_chunk_id=chunks,
            teacher_chunk_id=teacher.chunks.teacher,
            student_vocab_size=self.student_vocab_size,
            teacher_vocab_size=self.teacher_vocab_size,
        )


def _strided_mask(mask: Tensor, is_sampled: Tensor | None = None) -> list[Tensor]:
    mask = mask & (torch.arange(mask.shape[1], device=mask.device) % STRIDE == 1)
    return [mask if is_sampled is None else mask & is_sampled.unsqueeze(1)]


def _strided_chunks(chunks: Tensor, is_sampled: Tensor | None = None) -> list[Tensor]:
    chunks = chunks.masked_fill(chunks % STRIDE != 1, -1)
    return [chunks if is_sampled is None else chunks.masked_fill(~is_sampled.unsqueeze(1), -1)]


def select_teacher(scores: Sequence[SequenceScores], *, per: Literal["sequence", "batch"]) -> Tensor:
    """Return the index of the teacher with the fewest bits per byte, int64 [B], per sequence or for the whole batch.

    Ties go to the first teacher; a teacher without a scored byte comes last (methods.md §6.3).
    """
    if per == "sequence":
        return bits_per_byte(scores).argmin(0)
    totals = [SequenceScores(*(tensor.sum(0, keepdim=True) for tensor in score_tensors(score))) for score in scores]
    return bits_per_byte(totals).argmin(0).expand(len(scores[0].bits))


def teacher_weights(settings: WeightedSum, weights: Sequence[float], vocab_sizes: Sequence[int]) -> list[float]:
    """Return the sequence-independent factor of each teacher's loss (methods.md §6.1).

    It is the teacher's weight, or 1 with weights per sequence, which already include it. Vocabulary scaling multiplies
    it by log W_i / log min_j W_j, so that a divergence over more tokens counts for more.
    """
    factors = list(weights) if settings.score is None else [1.0] * len(weights)
    if not settings.vocabulary_scaling:
        return factors
    smallest = math.log(min(vocab_sizes))
    return [factor * math.log(size) / smallest for factor, size in zip(factors, vocab_sizes, strict=True)]


def weighted(batch: Batch, weights_IB: Tensor) -> Batch:
    """Set each teacher's sequence weights, [teachers, B], in the batch."""
    pairs = zip(batch.teachers, weights_IB, strict=True)
    return replace(batch, teachers=tuple(replace(teacher, weights=weights) for teacher, weights in pairs))


def sequence_weights(
    scores: Sequence[SequenceScores], *, score: Score, alpha: float, priors: Sequence[float]
) -> Tensor:
    """Compute softmax_i(alpha · score_i + log prior_i) per sequence: float32 [teachers, B], detached (methods.md §6.1).

    score_i is −bits per byte, −entropy in bits per byte, or the largest probability per byte: 2^(−its bits per byte),
    the geometric mean over bytes. priors: one per teacher, above 0; with equal scores the weights are proportional to
    them. A teacher without a scored byte in a sequence gets weight 0; if all lack one, only the priors count. A NaN
    score gives its teacher a weight of NaN and does not affect the other teachers: the metrics then name the teacher,
    and the step is skipped (methods.md §12).
    """
    bits = bits_per_byte(scores)
    score_IB = torch.exp2(-bits) if score == "max_probability" else -bits
    log_prior_I1 = torch.tensor(priors, dtype=bits.dtype).log().unsqueeze(1)
    has_bytes = bits.isfinite()
    weights = (alpha * score_IB + log_prior_I1).masked_fill(~has_bytes, -torch.inf).softmax(0)
    weights = torch.where(has_bytes.any(0), weights, log_prior_I1.softmax(0))
    return weights.masked_fill(bits.isnan(), torch.nan).float()


def weighted_by_confidence(
    batch: Batch, scores: Sequence[SequenceScores | None], alphas: Sequence[float | None]
) -> Batch:
    """Add rollout weights for each teacher with an alpha, the `power_alpha` of its term.

    scores: one entry per teacher with score="log_probability" for the rows of the batch, or None if it has no alpha. A
    batch without samples is returned unchanged.
    """
    if batch.sampled is None:
        return batch
    prompts, entries = batch.sampled.prompts, zip(batch.teachers, scores, alphas, strict=True)
    return replace(batch, teachers=tuple(_with_rollout_weights(*entry, prompts) for entry in entries))


def _with_rollout_weights(
    teacher: TeacherRows, scores: SequenceScores | None, alpha: float | None, prompts: Tensor
) -> TeacherRows:
    if scores is None or alpha is None:
        return teacher
    logprob = mean_logprob(scores)
    # Keep NaN: the metrics then name the teacher, and the step is skipped (methods.md §12).
    weights = confidence_weights(logprob.nan_to_num(nan=-torch.inf, neginf=-torch.inf), prompts, alpha)
    return replace(teacher, rollout_weights=weights.masked_fill(logprob.isnan(), torch.nan).float())


_Scores = Sequence[SequenceScores]
"""Scores of the batch rows, one entry per teacher."""


def _unchanged(settings: AggregationBase, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    return batch


@dataclass(frozen=True, slots=True)
class Rule:
    """The functions of an aggregation; each takes the settings as its first argument."""

    factors: Callable[[Any, Sequence[float], Sequence[int]], list[float]] = lambda settings, weights, vocab_sizes: (
        [1.0] * len(weights)
    )
    """Function from the teachers' weights and vocabulary sizes to the factors of their losses."""
    apply_weights: Callable[[Any, Batch, _Scores, Sequence[float]], Batch] = _unchanged
    """Function from the global batch, the scores that the settings request and the teachers' configured weights to the
    batch with sequence weights, or with empty rows for teachers that were not selected.
    """
    counts_together: bool = False
    """Each text has one teacher, and units of all teachers count alike."""
    averages_logits: bool = False
    """All teachers' logits are averaged, so there is one loss."""


def _weighted_by_scores(settings: WeightedSum, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    if settings.score is None:
        return batch
    return weighted(batch, sequence_weights(scores, score=settings.score, alpha=settings.alpha, priors=priors))


def _selected(settings: SelectTeacher, batch: Batch, scores: _Scores, priors: Sequence[float]) -> Batch:
    """Keep only the selected teacher's row of each sequence.

    A NaN score cannot be compared: its teacher is selected with a weight of NaN, so that the metrics name it and the
    step is skipped (methods.md §12).
    """
    selected = mask_unrouted(batch, select_teacher(scores, per=settings.per))
    is_nan = bits_per_byte(scores).isnan()
    if not is_nan.any():
        return selected
    return weighted(selected, torch.ones(is_nan.shape).masked_fill(is_nan, torch.nan))


RULES: dict[type[AggregationBase], Rule] = {
    WeightedSum: Rule(factors=teacher_weights, apply_weights=_weighted_by_scores),
    AveragedLogits: Rule(averages_logits=True),
    SelectTeacher: Rule(apply_weights=_selected, counts_together=True),
    Routed: Rule(counts_together=True),
}
require_lines(choices(Aggregation), RULES, "RULES in nemo_opd/aggregation/rules.py")


def apply_teacher_weights(
    settings: AggregationBase, batch: Batch, scores: _Scores, *, priors: Sequence[float]
) -> Batch:
    """Apply the aggregation's teacher weights, or its selection of teachers, to the global batch.

    scores: one entry per teacher for the rows of the batch; unused by aggregations without a score. priors: the
    teachers' configured weights.
    """
    return RULES[type(settings)].apply_weights(settings, batch, scores, priors)
