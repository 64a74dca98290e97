"""GPUs reserved for a rollout server."""

import os

import torch

from nemo_opd.config.rollout import RolloutBase, ServerRollout


def server_gpus(rollout: RolloutBase) -> tuple[str, ...]:
    """Return the names of the last `rollout.gpus` GPUs that this process sees."""
    if not isinstance(rollout, ServerRollout) or rollout.gpus is None:
        return ()
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = names.split(",") if names else [str(i) for i in range(torch.cuda.device_count())]
    return tuple(visible[-rollout.gpus :])
