"""A server's share of memory."""

import torch

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.rollout.base import EngineSpec

OWN_SHARE, COMMON_SHARE = 0.9, 0.3
"""Memory shares of a server: on separate GPUs, and at least on the training's GPUs or on CPUs."""


def default_share(settings: ServerRollout, spec: EngineSpec) -> float:
    """Return the memory share of a server that is started here without `rollout.memory_share`."""
    if torch.cuda.is_available() and (settings.has_own_gpus or not spec.is_training):
        return OWN_SHARE
    return COMMON_SHARE if spec.memory_share is None else spec.memory_share
