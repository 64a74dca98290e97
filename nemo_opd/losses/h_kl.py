"""gold on relaxed pairs, which hold most of a projection row's weight (methods.md §5.5)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.gold import PairedOptions, paired_loss
from nemo_opd.losses.learned_projection import LearnedProjection
from nemo_opd.losses.pairs import TokenPairs

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix


@Loss
def h_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix | LearnedProjection,
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
    """Compute `gold` on the pairs {(s, argmax_t R[s, t])} of weight ≥ 0.6, and `kd` (methods.md §5.5).

    Arguments as for `gold`. If several student tokens claim a teacher token, an exact row wins, then the higher weight,
    then the lower id. A `LearnedProjection` as `projection` gets a gradient too: its pairs come from R₀, and the
    student token of a learned row gives R_st p_s to its pair's cell and (1 − R_st) p_s to the rest cell (methods.md
    §2.8). Raises ConfigError for shapes, sizes, weights or names that do not fit, ProjectionError for a projection
    without such pairs, or if no learned row is in a pair.
    """
    inputs = ChunkInputs.of(
        student_logits, teacher_logits, temperature=temperature, projection=projection, takes_truncated=True, **shared
    )
    learned = projection if isinstance(projection, LearnedProjection) else None
    matrix = projection.start if isinstance(projection, LearnedProjection) else projection
    pairs = TokenPairs.relaxed(matrix, inputs.student_size, inputs.teacher_size, inputs.device)
    return paired_loss(
        inputs,
        pairs,
        Divergence(divergence, beta, mixed_weight),
        PairedOptions(merge, common_weight, uncommon_weight, uncommon_topk, continuation_weight, compat),
        None if learned is None else learned.shares(pairs),
    )
