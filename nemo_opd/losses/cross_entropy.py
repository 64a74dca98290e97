"""Cross-entropy of the text's tokens."""

from torch import Tensor

from nemo_opd.kernels.forms import NegLogProb, RowLoss
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows, trainable_rows
from nemo_opd.logits.term import GradientSink, Term, UnitRows, unit_cells
from nemo_opd.losses.arguments import check_positions, own_columns
from nemo_opd.losses.reduction import label_rows, next_tokens
from nemo_opd.losses.surprise import LIVE_COPIES, add_surprise, surprise


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
        return add_surprise(rows, targets[part], onto)

    cells = unit_cells(len(rows), LIVE_COPIES * size)
    for_kernels = RowLoss(NegLogProb, lambda part: NegLogProb(targets[part]))
    term = Term(rows, loss_of, cells, size, chunk_size=chunk_size, closed_form=closed_form, row_loss=for_kernels)
    return PlannedLoss.of("ce", student, [term], len(rows), normalizer)
