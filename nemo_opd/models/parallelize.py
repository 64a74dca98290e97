"""FSDP2, which shards parameters, gradients and optimizer state over the data-parallel ranks; activations."""

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import PreTrainedModel


def shard(model: PreTrainedModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype) -> None:
    """Shard in place over `mesh`, a decoder layer at a time.

    Communicates an all-gather of one layer's parameters before its forward and before its backward, and a
    reduce-scatter (fp32, mean over ranks) of its gradients.
    """
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
    layers = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in layers:
            fully_shard(module, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Let the model keep only its layers' inputs for backward."""
    # Newer and older transformers have different names for it.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})
