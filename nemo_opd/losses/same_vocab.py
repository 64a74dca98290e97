"""A divergence per position, for teachers with the student's vocabulary (METHODS §4)."""

from torch import Tensor

from nemo_opd.losses.arguments import check_positions, check_temperature, shared_columns
from nemo_opd.losses.chunked import chunked_sum, equal_parts
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.reduction import label_rows, reduced
from nemo_opd.types import LossOutput

LIVE_COPIES = 15
"""Tensors of a chunk's size alive at its peak (jsd, the largest)."""


def same_vocab(
    student_logits: Tensor,
    teacher_logits: Tensor,
    *,
    mask: Tensor,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> LossOutput:
    """τ² · Σ divergence(q, p) over scored tokens / normalizer (METHODS §4), and the metric `kd` in nats per token.

    Unshifted logits [B, S, V] and [B, S, W]; mask [B, S]: token i is scored, by the logits at i−1, so token 0 never
    counts. A head wider than the vocabulary (by default the narrower head) is cut before any softmax. normalizer:
    scored tokens of the global batch, by default of this call. chunk_size: positions computed at a time, by default
    what fits a byte budget. Raises ConfigError for shapes, sizes or names that do not fit.
    """
    check_temperature(temperature)
    check_positions(student_logits, mask=mask)
    check_positions(teacher_logits, mask=mask)
    size = shared_columns(student_logits, teacher_logits, student_vocab_size, teacher_vocab_size)
    compare = Divergence(divergence, beta, mixed_weight)
    rows = label_rows(mask)
    teacher_columns = teacher_logits.detach().flatten(0, 1).narrow(1, 0, size)

    def loss_of(student: Tensor, part: slice) -> Tensor:
        teacher = teacher_columns.index_select(0, rows[part]).to(student.dtype)
        log_q = (teacher / temperature).log_softmax(-1)
        return compare(log_q, (student / temperature).log_softmax(-1)).sum()

    parts = equal_parts(rows, LIVE_COPIES * size, chunk_size)
    total = chunked_sum(student_logits, rows, loss_of, width=size, parts=parts)
    return reduced("kd", total * temperature**2, len(rows), normalizer)
