"""A divergence per position, for teachers with the student's vocabulary (METHODS §4)."""

from torch import Tensor

from nemo_opd.losses.arguments import check_positions, check_temperature, shared_columns
from nemo_opd.losses.chunked import chunked_sum, equal_parts
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.reduction import label_rows, reduced
from nemo_opd.losses.support import Support
from nemo_opd.types import LossOutput

LIVE_COPIES = 15
"""Tensors of the size of a chunk's cells alive at its peak (jsd, the largest)."""
LIVE_ROWS = 10
"""Tensors of the size of a chunk's rows alive besides, where the cells are not the columns."""


def same_vocab(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    support: str = "full",
    top_k: int | None = None,
    normalization: str = "rest",
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> LossOutput:
    """τ² · Σ divergence(q, p) over scored tokens / normalizer (METHODS §4), and the metric `kd` in nats per token.

    Unshifted logits [B, S, V] and [B, S, W]; mask [B, S]: token i is scored, by the logits at i−1, so token 0 never
    counts. A head wider than the vocabulary (by default the narrower head) is cut before any softmax. support, top_k,
    normalization: see `Support`. Without the rest cell a support other than full is there for parity with other systems
    only, and the loss is not bounded by the full one. normalizer: scored tokens of the
    global batch, by default of this call. chunk_size: positions computed at a time, by default what fits a byte budget.
    Raises ConfigError for shapes, sizes or names that do not fit.
    """
    check_temperature(temperature)
    check_positions(student_logits, mask=mask)
    check_positions(teacher_logits, mask=mask)
    size = shared_columns(student_logits, teacher_logits, student_vocab_size, teacher_vocab_size)
    of = Divergence(divergence, beta, mixed_weight)
    columns = Support(support, top_k, normalization)
    rows = label_rows(mask)
    teacher_columns = teacher_logits.detach().flatten(0, 1).narrow(1, 0, size)

    def loss_of(student: Tensor, part: slice) -> Tensor:
        teacher = teacher_columns.index_select(0, rows[part])
        return columns.compare(of, teacher.to(student.dtype) / temperature, student / temperature).sum()

    besides = 0 if columns.takes_all(size) else LIVE_ROWS * size
    parts = equal_parts(rows, LIVE_COPIES * columns.num_cells(size) + besides, chunk_size)
    total = chunked_sum(student_logits, rows, loss_of, width=size, parts=parts)
    return reduced("kd", total * temperature**2, len(rows), normalizer)
