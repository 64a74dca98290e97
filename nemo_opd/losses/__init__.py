"""Losses: tensors in, this rank's share of a sum over units out (METHODS §3-§8)."""

from nemo_opd.losses.cross_entropy import cross_entropy
from nemo_opd.losses.p_kl import p_kl
from nemo_opd.losses.same_vocab import same_vocab

__all__ = ["cross_entropy", "p_kl", "same_vocab"]
