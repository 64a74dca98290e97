"""Cross entropy with the text itself."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.logit_rows import LogitRows, trainable_rows
from nemo_opd.losses.planned import Loss, PlannedLoss
from nemo_opd.losses.reduction import label_rows
from nemo_opd.losses.saved import scaled
from nemo_opd.losses.softmax import softmax
from nemo_opd.losses.term import Term, unit_cells

LIVE_COPIES = 4
"""Tensors of a chunk's size alive at its peak."""


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
    """−Σ log p(token) over scored tokens / normalizer (METHODS §7), and the metric `ce` in nats per token.

    Unshifted logits [B, S, V]; ids [B, S]; mask [B, S]: token i is scored, by the logits at i−1, so token 0 never
    counts. vocab_size: columns of the head that belong to the tokenizer, by default all. normalizer: scored tokens of
    the global batch, by default of this call. Raises ConfigError for shapes or sizes that do not fit.
    """
    student = trainable_rows(student_logits)
    check_positions(student.shape, ids=ids, mask=mask)
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(mask)
    targets = ids.flatten().index_select(0, rows + 1).long()

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        return _Surprise.apply(logits, targets[part].unsqueeze(1))

    term = Term(rows, loss_of, unit_cells(len(rows), LIVE_COPIES * size), size, chunk_size=chunk_size)
    return PlannedLoss.of("ce", student, [term], len(rows), normalizer)


class _Surprise(torch.autograd.Function):
    """−log p [R] of targets [R, 1] by logits [R, X]. Saves its gradient, formed in forward: p, less 1 at the target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        p, log_sum = softmax(logits)
        surprise = log_sum - logits.gather(-1, targets)
        ctx.save_for_backward(p.scatter_add_(-1, targets, p.new_tensor(-1.0).expand_as(targets)))
        return surprise.squeeze(-1).to(logits.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        (gradient,) = ctx.saved_tensors
        return scaled(gradient, grad_output.unsqueeze(-1)), None
