"""Strict next-token accuracy: how often the likeliest token is the token."""

import torch
from torch import Tensor

from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.reduction import label_rows
from nemo_opd.types import Mean, TokenRows

LIVE_COPIES = 2
"""Tensors of a chunk's size alive at its peak: the rows as they come, and in fp32."""


def accuracy(
    logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int, chunk_size: int | None = None
) -> Mean:
    """Share of the scored tokens that have the largest logit among the first `vocab_size` columns; no gradient.

    logits [B, S, V] are unshifted: token i is scored by the logits at i−1, so token 0 never counts. Of equal largest
    logits one column counts, whichever `argmax` names. Raises ConfigError for shapes or sizes that do not fit.
    """
    with torch.no_grad():
        plan = plan_accuracy(logits_BSV, tokens, vocab_size=vocab_size, chunk_size=chunk_size)
        found = plan.compute().metrics["accuracy"]
    assert isinstance(found, Mean)
    return found


def plan_accuracy(
    logits_BSV: Tensor | LogitRows, tokens: TokenRows, *, vocab_size: int, chunk_size: int | None = None
) -> PlannedLoss:
    """Plan the metric `accuracy`, to be computed together with losses."""
    student = trainable_rows(logits_BSV)
    check_positions(student.shape, ids=tokens.ids, loss_mask=tokens.loss_mask)
    size = own_columns("vocab_size", vocab_size, student.shape[-1], student.shape[-1])
    rows = label_rows(tokens.loss_mask)
    targets = tokens.ids.flatten().index_select(0, rows + 1).long()

    def hits(logits: Tensor, part: slice) -> Tensor:
        return (logits.argmax(-1) == targets[part]).to(logits.dtype)

    term = Term(rows, hits, unit_cells(len(rows), LIVE_COPIES * size), size, chunk_size=chunk_size)
    return PlannedLoss.of("accuracy", student, [term], len(rows), None)
