"""GPUs that a rollout server has for itself."""

import os

import torch

from nemo_opd.config.rollout import RolloutBase, ServerRollout


def server_gpus(rollout: RolloutBase) -> tuple[str, ...]:
    """Return the names of the last GPUs that this process sees, as many as `rollout.gpus`."""
    if not isinstance(rollout, ServerRollout) or rollout.gpus is None:
        return ()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = named.split(",") if named else [str(i) for i in range(torch.cuda.device_count())]
    return tuple(visible[-rollout.gpus :])
