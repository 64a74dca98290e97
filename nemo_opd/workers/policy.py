"""The policy-gradient term of rewards."""

from nemo_opd.config.loss import GRPOLoss
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.policy_gradient import grpo
from nemo_opd.losses.reduction import sampled_mask
from nemo_opd.types import Batch, SampledRows


def plan_policy(
    logits: LogitRows, batch: Batch, sampled: SampledRows, settings: GRPOLoss, *, normalizer: int, vocab_size: int
) -> PlannedLoss:
    """Plan the term, multiplied by its weight."""
    policy = grpo.plan(
        logits,
        ids=batch.student.ids,
        mask=sampled_mask(batch.student.loss_mask, sampled),
        logprobs=sampled.logprobs,
        behaviour_logprobs=sampled.behaviour_logprobs,
        advantages=sampled.advantages,
        clip_low=settings.clip_low,
        clip_high=settings.clip_high,
        dual_clip=settings.dual_clip,
        importance_level=settings.importance_level,
        importance_cap=settings.importance_cap,
        importance_veto=settings.importance_veto,
        normalizer=normalizer,
        vocab_size=vocab_size,
    )
    return policy.times(settings.policy_weight)
