"""gold on more pairs: those that a projection matches with most of a row's weight (methods.md §5.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.gold import PairedOptions, paired_loss
from nemo_opd.losses.pairs import TokenPairs

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@Loss
def h_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    merge: str | None = None,
    common_weight: float | None = None,
    uncommon_weight: float | None = None,
    uncommon_topk: int | None = None,
    continuation_weight: float = 0.0,
    compat: str | None = None,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute `gold`, which see, on the pairs {(s, argmax_t R[s, t])} of weight ≥ 0.6, and `kd` (methods.md §5.5).

    Of the student tokens that claim one teacher token an exact row wins, then the higher weight, then the lower id.
    Raises ConfigError for shapes, sizes, weights or names that do not fit, ProjectionError for a projection without
    such pairs.
    """
    inputs = ChunkInputs.of(
        student_logits, teacher_logits, temperature=temperature, projection=projection, takes_truncated=True, **shared
    )
    return paired_loss(
        inputs,
        TokenPairs.relaxed(projection, inputs.student_size, inputs.teacher_size, inputs.device),
        Divergence(divergence, beta, mixed_weight),
        PairedOptions(merge, common_weight, uncommon_weight, uncommon_topk, continuation_weight, compat),
    )
