"""Cross-entropy of the text's tokens, and −log p of tokens for other losses."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.kernels.forms import NegLogProb, RowLoss
from nemo_opd.logits.blockwise import scaled
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import GradientSink, Term, UnitRows, unit_cells
from nemo_opd.losses.arguments import check_positions, label_rows, next_tokens, own_columns
from nemo_opd.losses.fused import fused, softmax

LIVE_COPIES = 4
"""Tensors of the size of the logits, themselves included, that are alive at the memory peak."""


@Loss
def cross_entropy(
    student_logits: Tensor | LogitRows,
    ids: Tensor,
    *,
    mask: Tensor,
    normalizer: float | None = None,
    vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """Compute −Σ log p(token) over scored tokens / normalizer (methods.md §7.3), and the metric `ce` in nats per token.

    Unshifted logits [B, S, V]; ids [B, S]; mask [B, S]: token i is scored by the logits at i−1, so token 0 never
    counts. vocab_size: leading columns of the head that belong to the tokenizer, by default all. normalizer: scored
    tokens of the global batch, by default of this call. Raises ConfigError for shapes or sizes that do not fit.
    """
    student = trainable_rows(student_logits)
    check_positions(student.shape, ids=ids, mask=mask)
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(mask)
    targets = next_tokens(ids, rows).long()

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        return surprise(logits, targets[part])

    def closed_form(rows: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        return _add_surprise(rows, targets[part], onto)

    cells = unit_cells(len(rows), LIVE_COPIES * size)
    for_kernels = RowLoss(NegLogProb, lambda part: NegLogProb(targets[part]))
    term = Term(rows, loss_of, cells, size, chunk_size=chunk_size, closed_form=closed_form, row_loss=for_kernels)
    return PlannedLoss.of("ce", student, [term], len(rows), normalizer)


def surprise(logits: Tensor, targets: Tensor) -> Tensor:
    """Compute −log p of each row's target token, in nats: logits [R, X] and int64 [R] → [R]."""
    return _Surprise.apply(logits, targets.unsqueeze(1))


class _Surprise(torch.autograd.Function):
    """−log p [R] of targets [R, 1] from logits [R, X]. Saves its gradient: p, minus 1 at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        p, log_sum = softmax(logits)
        surprise = log_sum - logits.gather(-1, targets)
        ctx.save_for_backward(_subtract_one_at(p, targets))
        return surprise.squeeze(-1).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, grad_output.unsqueeze(-1)), None


@fused
def _add_surprise(rows: UnitRows, targets: Tensor, onto: GradientSink) -> Tensor:
    """Compute −log p from logits/τ of units and targets, int64 [u] → [u], and add the gradient to `onto`."""
    logits, targets = rows.gather(), targets.unsqueeze(1)
    p, log_sum = softmax.function(logits)
    onto.add(_subtract_one_at(p, targets))
    return (log_sum - logits.gather(1, targets)).squeeze(1).to(logits.dtype)


def _subtract_one_at(p: Tensor, targets: Tensor) -> Tensor:
    """Subtract 1 from p [..., X] at targets, int64 [..., 1]; in place unless compiled."""
    if torch.compiler.is_compiling():  # Fuses into the pass that computes p; a scatter would be another pass.
        return p - (torch.arange(p.shape[-1], device=p.device) == targets).to(p.dtype)
    return p.scatter_add_(-1, targets, p.new_full((), -1.0).expand_as(targets))
