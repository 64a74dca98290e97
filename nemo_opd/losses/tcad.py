"""TCAD: divergence on likely tokens and the student's mass on them, for the student's samples (methods.md §10.2)."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import LabelPositions, TokenArguments, check_temperature, over
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.fused import log_sum_exp
from nemo_opd.losses.support import Columns, Support, largest
from nemo_opd.types import Mean, Metric

_LIVE_ROWS = 6
"""Tensors of the size of a block's rows that are alive at its memory peak."""
_LIVE_CELLS = 30
"""Additional fp32 numbers per column of the support; an int64 index counts as two."""


@Loss
def tcad(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    support_size: int = 256,
    divergence: str = "forward_kl",
    coverage_coef: float = 1.0,
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    support: str = "interleaved",
    **shared: Unpack[TokenArguments],
) -> PlannedLoss:
    """Compute τ² · Σ_b w_b · mean over its scored tokens of divergence(q̂, p̂) − coverage_coef · log P(U) / normalizer.

    methods.md §10.2. U: the first `support_size` distinct tokens of teacher's likeliest, student's likeliest, teacher's
    second, … (support="interleaved"), or the union of both sides' `support_size` likeliest ("union"); a constant. q̂ and
    p̂ are renormalised on U, P(U) is the student's mass on U; forward KL with a coefficient of 1 is KL(q̂ ‖ p). Unshifted
    logits [B, S, V] of one vocabulary and mask [B, S], as in `same_vocab`. sequence_weights [B]: w_b, by default 1;
    sequences of weight 0 are skipped. normalizer: Σ w_b over the global batch's sequences with a scored token, by
    default over this call's. It is the number of sequences if none has a weight, and the number of prompts if each
    prompt's weights sum to 1. The metric `kd` is the unweighted mean over scored tokens, in nats. Raises ConfigError
    for shapes, sizes or names that do not fit.
    """
    check_temperature(temperature)
    check_choice("support", support, ("interleaved", "union"))
    if support_size < 1:
        raise ConfigError(f"support_size={support_size}: a support has at least 1 token; give a larger number")
    if not coverage_coef >= 0:
        raise ConfigError(f"coverage_coef={coverage_coef} is not a weight; give 0 or more")
    if support_size == 1 and coverage_coef == 0 and support == "interleaved":
        raise ConfigError(
            "support_size=1 with coverage_coef=0: one renormalised token is 1 on both sides, and nothing is learned; "
            "raise one of them"
        )
    places = LabelPositions.of(student_logits, teacher_logits, **shared)
    measure = Divergence(divergence, beta, mixed_weight)
    ahead = places.teacher_ahead()

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        student, teacher = over(logits, temperature), over(ahead.of(part).to(logits.dtype), temperature)
        if support_size >= places.size:
            return measure.of_logits(teacher, student)
        if support == "union":
            columns = Support("union", support_size).choose(teacher, student)
        else:
            columns = interleaved(teacher, student, support_size)
        if coverage_coef == 0:
            return measure.of_logits(columns.take(teacher), columns.take(student))
        inside, log_rest = columns.cells(student).tensor_split([-1], 1)
        # −log P(U); the difference of two log-masses would lose its digits near 0.
        uncovered = F.softplus(log_rest.squeeze(1) - log_sum_exp(inside))
        return measure.of_logits(columns.take(teacher), inside) + coverage_coef * uncovered

    weights, num_tokens = _sequence_means(places, len(shared["mask"]), shared.get("sequence_weights"))
    dtype = torch.promote_types(places.student.dtype, torch.float32)
    cells = unit_cells(len(places), _LIVE_ROWS * places.size + _LIVE_CELLS * min(2 * support_size, places.size))
    term = Term(
        places.student_rows,
        loss_of,
        cells,
        places.size,
        weights=(weights / num_tokens).to(dtype).index_select(0, places.sequences),
        chunk_size=places.chunk_size,
        ahead=ahead,
    )
    # Sum weights only without a normalizer, since this waits for the device.
    divisor = (float(weights.sum()) if places.normalizer is None else places.normalizer) or 1

    def metrics_of(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        return {"kd": Mean(unweighted, len(places))}

    return PlannedLoss(places.student, [term.times(temperature**2)], 1 / divisor, metrics_of)


def interleaved(teacher_logits: Tensor, student_logits: Tensor, size: int) -> Columns:
    """Choose the first `size` distinct columns of teacher's 1st, student's 1st, teacher's 2nd, …, from logits [U, V].

    size ≤ V. The choice gets no gradient.
    """
    ranked = [_ranked(side, size) for side in (teacher_logits, student_logits)]
    alternating = torch.stack(ranked, -1).flatten(1)
    repeated = _repeats(alternating)
    place = (~repeated).cumsum(1) - 1
    # Repeats and columns beyond `size` go to an extra last place.
    target = place.masked_fill(repeated | (place >= size), size)
    columns = alternating.new_empty(len(alternating), size + 1).scatter_(1, target, alternating)
    return Columns(columns[:, :size])


def _ranked(logits: Tensor, size: int) -> Tensor:
    """Return the `size` largest columns of each row, the largest first: [U, V] → int64 [U, size]."""
    columns = largest(logits, size)
    return columns.gather(1, logits.detach().gather(1, columns).argsort(stable=True, dim=1, descending=True))


def _repeats(columns: Tensor) -> Tensor:
    """Mark columns that occur earlier in their row: int64 [U, X] → bool [U, X]."""
    values, order = columns.sort(stable=True, dim=1)
    is_repeat = torch.zeros_like(columns, dtype=torch.bool)
    is_repeat[:, 1:] = values[:, 1:] == values[:, :-1]
    return torch.zeros_like(is_repeat).scatter_(1, order, is_repeat)


def _sequence_means(places: LabelPositions, num_sequences: int, sequence_weights: Tensor | None) -> list[Tensor]:
    """Return w_b, float64 [B], 0 for sequences without a scored token, and their scored tokens, 0 for weight 0."""

    def means(sequences: Tensor, *optional: Tensor) -> list[Tensor]:
        num_tokens = torch.bincount(sequences, minlength=num_sequences)
        has_tokens = (num_tokens > 0).double()
        return [has_tokens * optional[0] if optional else has_tokens, num_tokens]

    return compute_on_host(means, places.sequences, *([] if sequence_weights is None else [sequence_weights]))
