"""Losses: map tensors to this rank's share of a sum over units (methods.md §3–§8)."""

from nemo_opd.losses.alm import alm
from nemo_opd.losses.byte_prefix import byte_prefix
from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.escd import escd
from nemo_opd.losses.gold import gold, h_kl
from nemo_opd.losses.learned_projection import LearnedProjection
from nemo_opd.losses.p_kl import p_kl
from nemo_opd.losses.policy_gradient import confidence_weights, group_advantages, grpo, reward_weights
from nemo_opd.losses.same_vocab import same_vocab
from nemo_opd.losses.sampled_kl import sampled_chunk_kl, sampled_kl
from nemo_opd.losses.shared_prefix import shared_prefix
from nemo_opd.losses.strict import strict
from nemo_opd.losses.tcad import tcad
from nemo_opd.losses.uld import uld

__all__ = [
    "LearnedProjection",
    "alm",
    "byte_prefix",
    "confidence_weights",
    "cross_entropy",
    "escd",
    "gold",
    "group_advantages",
    "grpo",
    "h_kl",
    "p_kl",
    "reward_weights",
    "same_vocab",
    "sampled_chunk_kl",
    "sampled_kl",
    "shared_prefix",
    "strict",
    "tcad",
    "uld",
]
