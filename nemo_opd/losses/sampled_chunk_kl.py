"""KL between student and teacher, estimated on sampled aligned chunks (methods.md §5, §10.4)."""

from __future__ import annotations

from typing import Unpack

from torch import Tensor

from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.arguments import check_positions, without_none
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.clipped_ratio import Clip
from nemo_opd.losses.importance import Importance
from nemo_opd.losses.kl_estimate import KLEstimate, SampledChunks
from nemo_opd.losses.realised_chunks import RealisedChunks


@Loss
def sampled_chunk_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    mask: Tensor | None = None,
    logprobs: Tensor | None = None,
    behaviour_logprobs: Tensor | None = None,
    estimator: str = "k1",
    update: str = "policy_gradient",
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    importance_level: str = "token",
    importance_cap: float | None = None,
    importance_veto: float | None = None,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute `sampled_kl` with a chunk as one action: Σ over sampled chunks of the loss of a KL estimate / normalizer.

    s = Σ log p(token) over a chunk's student tokens and t = Σ log q(token) over its teacher tokens, at temperature 1.
    With these, k1, k2, k3, the advantage A = −estimate and −min(r A, clip(r) A) are defined as in `sampled_kl`;
    r = exp(s − Σ logprobs) is the chunk's ratio, the importance weight of that action. With one token per chunk and
    side this is `sampled_kl`.

    Expectation, unless a ratio is clipped: let P(a|h) be the student's probability of writing the tokens a after h,
    Q(a|h) the probability of the teacher's tokens for the same bytes, and ρ(a|h) the probability that a, once written,
    is a unit. With ρ, Q and the probability of h as constants, k1 with policy_gradient and k2 with direct have the
    gradient of E_h Σ_a ρ [P log(P/Q) − P + Q], which is ≥ 0 and estimated by the metric `kd`; k3 with direct has the
    gradient of E_h Σ_a ρ [Q log(Q/P) − Q + P]. If every student token is a chunk, ρ is 1 and these are the gradients of
    the reverse and forward KL of its next tokens. P counts only the sampled tokens, not all spellings of the bytes, and
    Q only the teacher's tokenization; see docs/losses.md.

    logprobs [B, S]: log-probabilities of the sampled tokens under the model that sampled them, by default the current
    model; behaviour_logprobs, importance_*: as for `sampled_kl`, W being the product over the chunk's tokens. mask
    [B, S]: sampled tokens that count for weights and vetoes of sequences; by default the tokens in chunks. Metrics: as
    for `sampled_kl`, per chunk. Raises ConfigError for shapes, sizes, names or bounds that do not fit.
    """
    importance = Importance(importance_level, importance_cap, importance_veto)
    estimate = KLEstimate(estimator, update, Clip(clip_low, clip_high, dual_clip), importance)
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=1.0, takes_truncated=True, **shared)
    token_tensors = without_none(mask=mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    check_positions(inputs.student.shape, **token_tensors)
    units = inputs.units
    student = RealisedChunks.of(units.student_rows, units.student_lengths, inputs.student_ids)
    teacher = RealisedChunks.of(units.teacher_rows, units.teacher_lengths, inputs.teacher_ids)
    sampled = SampledChunks(
        inputs.student,
        student,
        teacher,
        inputs.teacher_ahead(teacher.positions.rows, teacher.positions.offsets),
        inputs.student_size,
        inputs.teacher_size,
        None if logprobs is None else student.positions.of_tokens(logprobs),
        None if behaviour_logprobs is None else student.positions.of_tokens(behaviour_logprobs),
        units.student_rows // inputs.student.shape[1],
        importance.of_sequences(
            inputs.student,
            ids=inputs.student_ids,
            mask=shared["student_chunk_id"] >= 0 if mask is None else mask,
            behaviour=logprobs if behaviour_logprobs is None else behaviour_logprobs,
            vocab_size=inputs.student_size,
        ),
        inputs.weights,
    )
    return estimate.plan(sampled, inputs.normalizer, inputs.chunk_size)
