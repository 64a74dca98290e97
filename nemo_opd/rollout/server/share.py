"""The share of memory that a server takes."""

import torch

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.rollout.base import EngineSpec

OWN_SHARE, COMMON_SHARE = 0.9, 0.3
"""Shares of memory of a server with separate GPUs, and the least of one on the training's GPUs or on CPUs."""


def default_share(settings: ServerRollout, spec: EngineSpec) -> float:
    """Return the share of memory that a server started here takes unless `rollout.memory_share` is set."""
    if torch.cuda.is_available() and (settings.has_own_gpus or not spec.is_training):
        return OWN_SHARE
    return COMMON_SHARE if spec.memory_share is None else spec.memory_share
