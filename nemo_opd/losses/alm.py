"""Likelihoods of whole chunks, whatever the tokens that spell them (METHODS §5)."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.losses.chunk_loss import ChunkInputs
from nemo_opd.losses.chunked import chunked_sum, compute_dtype, equal_parts
from nemo_opd.losses.reduction import reduced
from nemo_opd.types import LossOutput

LIVE_COPIES = 6
"""Tensors of a chunk's size alive at its peak."""
TINY_LOG = -40
"""Below, log(e^x − 1), log(1 + e^x) and log(1 − e^(−e^x)) differ from their leading term by less than float64 shows."""


def alm(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
    temperature: float = 1.0,
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> LossOutput:
    """τ · Σ −[a log b + (1 − a) log(1 − b)] over chunks / normalizer (METHODS §5), and the metric `kd` in nats.

    a = Q^{1/τ} and b = P^{1/τ}, where Q and P are the products of the probabilities, at temperature 1, that teacher and
    student give to the tokens of the chunk. The minimum, at b = a, is τ times the entropy of a coin of bias a.
    Unshifted logits [B, S, V] and [B, T, W]; ids and chunk ids [B, S] and [B, T], chunk ids −1 or non-decreasing; a
    chunk with token 0 of either side is no unit. Vocabulary sizes default to those of the heads. normalizer: units of
    the global batch, by default of this call. chunk_size: units computed at a time, by default what fits a byte budget.
    Raises ConfigError for shapes or sizes that do not fit.
    """
    inputs = ChunkInputs.of(
        student_logits,
        teacher_logits,
        student_ids=student_ids,
        teacher_ids=teacher_ids,
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
        temperature=temperature,
        student_vocab_size=student_logits.shape[-1] if student_vocab_size is None else student_vocab_size,
        teacher_vocab_size=teacher_logits.shape[-1] if teacher_vocab_size is None else teacher_vocab_size,
    )
    total = likelihood_sum(inputs, chunk_size)
    return reduced("kd", total, len(inputs.units), normalizer)


def likelihood_sum(inputs: ChunkInputs, chunk_size: int | None) -> Tensor:
    """τ · Σ −[a log b + (1 − a) log(1 − b)] over the units, a scalar with a gradient for the student's logits.

    chunk_size: units computed at a time, by default what fits a byte budget.
    """
    units, temperature = inputs.units, inputs.temperature
    tokens = ChunkTokens.of(units.student_rows, units.student_lengths, inputs.student_ids)
    log_surprise_q = _teacher_log_surprise(inputs, chunk_size)

    def loss_of(student: Tensor, part: slice) -> Tensor:
        log_surprise_p = _chunk_log_surprise(tokens, student, part, temperature)
        return binary_cross_entropy(log_surprise_q[tokens.units(part)], log_surprise_p).sum()

    parts = tokens.parts(LIVE_COPIES * inputs.student_size, chunk_size)
    return temperature * chunked_sum(
        inputs.student_logits, tokens.rows, loss_of, width=inputs.student_size, parts=parts
    )


def binary_cross_entropy(log_surprise_q: Tensor, log_surprise_p: Tensor) -> Tensor:
    """−[a log b + (1 − a) log(1 − b)] [U] from log(−log a) and log(−log b) [U]; the first is a constant.

    Neither −log b nor 1 − b underflows in this form. The gradient is a closed form, exactly 0 at a = b.
    """
    return _BinaryCrossEntropy.apply(log_surprise_q.detach(), log_surprise_p)


class _BinaryCrossEntropy(torch.autograd.Function):
    """With x = −log b, the value is a x − (1 − a) log(1 − b) and its derivative by log x is x (a − b)/(1 − b)."""

    @staticmethod
    def forward(ctx: Any, log_surprise_q: Tensor, log_surprise_p: Tensor) -> Tensor:
        surprise = log_surprise_p.exp()
        surprise_q = log_surprise_q.exp()
        not_a, not_b = -torch.expm1(-surprise_q), -torch.expm1(-surprise)
        log_not_b = log1mexp(log_surprise_p)
        ctx.save_for_backward((not_b - not_a) * (log_surprise_p - log_not_b).exp())
        return torch.exp(-surprise_q) * surprise - not_a * log_not_b

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, Tensor]:
        (gradient,) = ctx.saved_tensors
        return None, gradient * grad_output


@dataclass(frozen=True, slots=True)
class ChunkTokens:
    """The tokens of units, unit after unit."""

    rows: Tensor
    """int64 [R]: the logit rows, as indices into [B·S], that predict them."""
    targets: Tensor
    """int64 [R]: their ids."""
    place: Tensor
    """int64 [R]: which token of its unit."""
    lengths: list[int]
    """[U]"""
    ends: list[int]
    """[U]: the first of `rows` after each unit."""

    @staticmethod
    def of(first_rows: Tensor, lengths: Tensor, ids: Tensor) -> ChunkTokens:
        """One `tolist`, which waits for the device."""
        counts = lengths.tolist()
        begin = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=sum(counts))
        place = torch.arange(len(begin), device=begin.device) - begin
        rows = torch.repeat_interleave(first_rows, lengths, output_size=len(begin)) + place
        targets = ids.flatten().index_select(0, rows + 1).long()
        return ChunkTokens(rows, targets, place, counts, list(accumulate(counts)))

    def units(self, part: slice) -> slice:
        """The units whose tokens rows[part] are."""
        return slice(bisect_left(self.ends, part.start + 1), bisect_left(self.ends, part.stop) + 1)

    def parts(self, cells_per_row: int, chunk_size: int | None) -> list[slice]:
        """Slices of `rows` that cut no unit: of `chunk_size` units, by default as many as fit a byte budget."""
        if chunk_size is not None:
            unit_parts = equal_parts(torch.empty(len(self.ends)), 1, chunk_size)
            cuts = [self.ends[units.stop - 1] for units in unit_parts]
        else:
            cuts = self._cuts_near([rows.stop for rows in equal_parts(self.rows, cells_per_row, None)])
        return [slice(start, stop) for start, stop in zip([0, *cuts], cuts, strict=False)]

    def _cuts_near(self, wanted: list[int]) -> list[int]:
        """Ends of units, ascending, at or after the wanted ones."""
        return sorted({self.ends[bisect_left(self.ends, cut)] for cut in wanted})

    def sum_over_units(self, log_values: Tensor, part: slice) -> Tensor:
        """log Σ exp of the tokens' values in each unit: those of rows[part] → those of units(part)."""
        lengths, place = self.lengths[self.units(part)], self.place[part]
        unit = (place == 0).cumsum(0) - 1
        padded = log_values.new_full((len(lengths), max(lengths)), -math.inf)
        return padded.index_put((unit, place), log_values).logsumexp(-1)


@torch.no_grad()
def _teacher_log_surprise(inputs: ChunkInputs, chunk_size: int | None) -> Tensor:
    """log(−log a) of each unit, [U]."""
    columns = inputs.teacher_logits.flatten(0, 1).narrow(1, 0, inputs.teacher_size)
    dtype = compute_dtype(inputs.student_logits)
    tokens = ChunkTokens.of(inputs.units.teacher_rows, inputs.units.teacher_lengths, inputs.teacher_ids)
    found = [
        _chunk_log_surprise(tokens, columns.index_select(0, tokens.rows[part]).to(dtype), part, inputs.temperature)
        for part in tokens.parts(LIVE_COPIES * inputs.teacher_size, chunk_size)
    ]
    return torch.cat([columns.new_zeros(0, dtype=dtype), *found])


def _chunk_log_surprise(tokens: ChunkTokens, logits: Tensor, part: slice, temperature: float) -> Tensor:
    """log(−log P^{1/τ}) of each unit of a part, from the logits [R, V] of its tokens."""
    index = tokens.targets[part].unsqueeze(1)
    others = logits.scatter(1, index, torch.finfo(logits.dtype).min).logsumexp(1)
    odds_against = others - logits.gather(1, index).squeeze(1)
    return tokens.sum_over_units(log_surprise(odds_against), part) - math.log(temperature)


def log_surprise(odds_against: Tensor) -> Tensor:
    """log(−log p) of what has the log-odds log((1 − p)/p).

    −log p itself is 0 in fp32 where p is nearer to 1 than 2^−24.
    """
    surprise = -F.logsigmoid(-odds_against)
    return torch.where(odds_against < TINY_LOG, odds_against, surprise.clamp(min=math.exp(2 * TINY_LOG)).log())


def log1mexp(log_x: Tensor) -> Tensor:
    """log(1 − e^{−x}) of log x."""
    x = log_x.clamp(min=TINY_LOG).exp()
    near, far = torch.log(-torch.expm1(-x)), torch.log1p(-torch.exp(-x))
    return torch.where(log_x < TINY_LOG, log_x, torch.where(x < math.log(2), near, far))
