"""Parallelism of a model over its ranks: context and tensor parallelism, then FSDP2."""

import warnings

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.mesh import context_axis, fsdp_axis, tensor_axis
from nemo_opd.models.context_parallel import check_context_parallel, use_ring_attention
from nemo_opd.models.decoder_layers import decoder_layers
from nemo_opd.models.tensor_parallel import cut_over_ranks
from nemo_opd.models.tensor_plan import tensor_plan


def check_parallelism(config: PretrainedConfig, parallelism: Parallelism, device: str, *, key: str) -> None:
    """Raise the errors of `parallelize` for a model of this configuration."""
    if parallelism.tp == parallelism.cp == 1:
        return
    check_context_parallel(parallelism.cp, device, key=f"{key}.cp")
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    if parallelism.cp > 1:
        use_ring_attention(model, parallelism.cp, key=f"{key}.cp")
    if parallelism.tp > 1:
        tensor_plan(model, parallelism.tp, sequence_parallel=parallelism.sequence_parallel, key=f"{key}.tp")


def parallelize(
    model: PreTrainedModel, mesh: DeviceMesh, parallelism: Parallelism, *, compute_dtype: torch.dtype, key: str
) -> None:
    """Shard a model in place over `mesh`, from `build_mesh`; it may be on meta.

    On one rank, a model that computes in its parameters' dtype stays unchanged: FSDP2 would copy all parameters before
    use, and each gradient after.

    Communicates as `cut_over_ranks`, `RingAttention` and `shard` do. Raises ModelError, naming a setting below `key`
    (`student`, `teachers.0`), for a model that cannot be sharded, and ConfigError for a device without ring attention.
    """
    if context_axis(mesh) is not None:
        check_context_parallel(parallelism.cp, mesh.device_type, key=f"{key}.parallelism.cp")
        use_ring_attention(model, parallelism.cp, key=f"{key}.parallelism.cp")
    tensor = tensor_axis(mesh)
    if tensor is not None:
        sequence_parallel = parallelism.sequence_parallel
        cut_over_ranks(model, tensor, sequence_parallel=sequence_parallel, key=f"{key}.parallelism.tp")
    if mesh.size() > 1 or any(parameter.dtype != compute_dtype for parameter in model.parameters()):
        reshard = parallelism.frees_gathered
        shard(model, fsdp_axis(mesh), compute_dtype=compute_dtype, reshard_after_forward=reshard)


def shard(
    model: PreTrainedModel, mesh: DeviceMesh, *, compute_dtype: torch.dtype, reshard_after_forward: bool = True
) -> None:
    """Shard parameters, gradients and optimizer state over the last axis of `mesh`, one decoder layer at a time.

    Communicates an all-gather of one layer's parameters before its forward and, with reshard_after_forward, before its
    backward, and a reduce-scatter (fp32, mean over ranks) of its gradients; if `mesh` has an axis of replicas, also an
    all-reduce of the shard's gradients over it.
    """
    # The warning is about in-place operations on a module's output, which we do not use.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    # Layer inputs keep their dtype: some models keep rotary angles in fp32.
    policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshard_after_forward)
    # Parameters outside the layers are needed first in backward, so they stay gathered until then.
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def sharded_units(model: nn.Module) -> list[FSDPModule]:
    """Return the modules whose parameters FSDP2 gathers together, outermost first; an empty list without FSDP2."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def checkpoint_activations(model: PreTrainedModel) -> None:
    """Make the model keep only its layers' inputs for backward."""
    # The name differs between versions of transformers.
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def compile_in_place(model: PreTrainedModel) -> None:
    """Compile decoder layers at their first call, once for all equal layers and any length."""
    for layer in decoder_layers(model):
        layer.compile(dynamic=True)


def is_compiled_in_place(model: PreTrainedModel) -> bool:
    """Return whether `compile_in_place` has compiled the model."""
    return any(module._compiled_call_impl is not None for module in model.modules())
