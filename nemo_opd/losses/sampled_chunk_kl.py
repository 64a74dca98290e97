"""The KL between student and teacher, estimated on the aligned chunks that were sampled (METHODS §5, §10)."""

from __future__ import annotations

from torch import Tensor

from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.arguments import check_positions, given
from nemo_opd.losses.chunk_loss import ChunkInputs
from nemo_opd.losses.clipped_ratio import Clip
from nemo_opd.losses.importance import Importance
from nemo_opd.losses.kl_estimate import KLEstimate, SampledChunks
from nemo_opd.losses.realised_chunks import RealisedChunks


@Loss
def sampled_chunk_kl(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    student_ids: Tensor,
    teacher_ids: Tensor,
    student_chunk_id: Tensor,
    teacher_chunk_id: Tensor,
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
    sequence_weights: Tensor | None = None,
    normalizer: float | None = None,
    student_vocab_size: int | None = None,
    teacher_vocab_size: int | None = None,
    chunk_size: int | None = None,
) -> PlannedLoss:
    """`sampled_kl` with a chunk as one action: Σ over sampled chunks of what lowers an estimate of the KL / normalizer.

    s = Σ log p(token) over the student's tokens of a chunk, t = Σ log q(token) over the teacher's, at temperature 1;
    k1, k2, k3, the advantage A = −estimate and −min(r A, clip(r) A) are those of `sampled_kl` with these, and
    r = exp(s − Σ logprobs) is the ratio of the whole chunk, the importance weight of that action. With chunks of one
    token a side it is `sampled_kl`.

    In expectation, at r = 1: let P(a|h) be the probability that the student writes the tokens a after h, Q(a|h) that of
    the teacher's tokens for the same bytes, and ρ(a|h) the probability that a, once written, is a unit. With ρ, Q and
    the probability of h as constants, k1 by policy gradient and k2 by direct have the gradient of
    E_h Σ_a ρ [P log(P/Q) − P + Q], which is 0 or more and estimated by the metric `kd`; k3 by direct has that of
    E_h Σ_a ρ [Q log(Q/P) − Q + P]. Where every token of the student is a chunk, ρ is 1 and these are the gradients of
    the KL of its next tokens, reverse and forward. P is of the tokens that were sampled, not of all that spell the
    bytes, and Q of the teacher's own tokens for them; see docs/losses.md.

    Unshifted logits [B, S, V] and [B, T, W]; ids and chunk ids [B, S] and [B, T], chunk ids −1 or non-decreasing; a
    chunk with token 0 of either side is no unit. logprobs [B, S]: of the sampled tokens by the model that sampled them,
    by default this one; behaviour_logprobs and the settings of importance: as of `sampled_kl`, w being the product over
    the tokens of the chunk. mask [B, S]: the sampled tokens, by which sequences are weighed and dropped; by default
    those of chunks. sequence_weights [B]: of each sequence's units in the sum; those of weight 0 are left out.
    Vocabulary sizes default to those of the heads. normalizer: units of the global batch, by default of this call.
    Metrics: as of `sampled_kl`, by chunk. Raises ConfigError for shapes, sizes, names or bounds that do not fit.
    """
    importance = Importance(importance_level, importance_cap, importance_veto)
    estimate = KLEstimate(estimator, update, Clip(clip_low, clip_high, dual_clip), importance)
    inputs = ChunkInputs.of(
        student_logits,
        teacher_logits,
        student_ids=student_ids,
        teacher_ids=teacher_ids,
        student_chunk_id=student_chunk_id,
        teacher_chunk_id=teacher_chunk_id,
        temperature=1.0,
        sequence_weights=sequence_weights,
        student_vocab_size=student_logits.shape[-1] if student_vocab_size is None else student_vocab_size,
        teacher_vocab_size=teacher_logits.shape[-1] if teacher_vocab_size is None else teacher_vocab_size,
    )
    of_tokens = given(mask=mask, logprobs=logprobs, behaviour_logprobs=behaviour_logprobs)
    check_positions(inputs.student.shape, **of_tokens)
    units = inputs.units
    student = RealisedChunks.of(units.student_rows, units.student_lengths, student_ids)
    teacher = RealisedChunks.of(units.teacher_rows, units.teacher_lengths, teacher_ids)
    sampled = SampledChunks(
        inputs.student,
        student,
        teacher,
        inputs.teacher_ahead(teacher.positions.rows, teacher.positions.offsets),
        inputs.student_size,
        inputs.teacher_size,
        None if logprobs is None else student.positions.of_tokens(logprobs),
        None if behaviour_logprobs is None else student.positions.of_tokens(behaviour_logprobs),
        units.student_rows // student_ids.shape[1],
        importance.of_sequences(
            inputs.student,
            ids=student_ids,
            mask=student_chunk_id >= 0 if mask is None else mask,
            behaviour=logprobs if behaviour_logprobs is None else behaviour_logprobs,
            vocab_size=inputs.student_size,
        ),
        inputs.weights,
    )
    return estimate.plan(sampled, normalizer, chunk_size)
