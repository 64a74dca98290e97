"""Parallelism of a model over its ranks: context and tensor parallelism, then FSDP2."""

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_opd.config.model import Parallelism
from nemo_opd.distributed.process_group import context_axis, fsdp_axis, tensor_axis
from nemo_opd.errors import ModelError
from nemo_opd.models.packed_attention import check_context_parallel, use_ring_attention
from nemo_opd.models.tensor_plan import Style, TensorPlan, decoder_layers, inside, tensor_plan
from nemo_opd.models.tensor_styles import (
    Block,
    Experts,
    Local,
    Mixture,
    Residual,
    RowParallel,
    VocabularyEmbedding,
    VocabularyHead,
    share_positions,
)


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

    Communicates as `_cut_over_ranks`, `RingAttention` and `shard` do. Raises ModelError, naming a setting below `key`
    (`student`, `teachers.0`), for a model that cannot be sharded, and ConfigError for a device without ring attention.
    """
    if context_axis(mesh) is not None:
        check_context_parallel(parallelism.cp, mesh.device_type, key=f"{key}.parallelism.cp")
        use_ring_attention(model, parallelism.cp, key=f"{key}.parallelism.cp")
    tensor = tensor_axis(mesh)
    if tensor is not None:
        sequence_parallel = parallelism.sequence_parallel
        _cut_over_ranks(model, tensor, sequence_parallel=sequence_parallel, key=f"{key}.parallelism.tp")
    if mesh.size() > 1 or any(parameter.dtype != compute_dtype for parameter in model.parameters()):
        reshard = parallelism.frees_gathered
        shard(model, fsdp_axis(mesh), compute_dtype=compute_dtype, reshard_after_forward=reshard)


def _cut_over_ranks(model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool, key: str) -> None:
    """Shard every matrix in place over the one-dimensional `mesh`; all parameters become DTensors on it.

    The model may be on meta; otherwise every rank must have the same values. Embedding and head are sharded along the
    vocabulary, and stay one parameter if they are tied; the model then returns each rank's columns of the logits.
    Communicates, for each block of a layer, an all-reduce of hidden states [B, S, D] forward and one backward; with
    `sequence_parallel`, an all-gather and a reduce-scatter instead. S must then be a multiple of the mesh's size,
    except within `whole_positions`. key: setting of tp. Raises ModelError naming it.
    """
    plan = tensor_plan(model, mesh.size(), sequence_parallel=sequence_parallel, key=key)
    _cut_vocabulary(model, mesh, f"{key}={mesh.size()}")
    residual = Residual(is_shared=sequence_parallel)
    modules = dict(model.named_modules())
    for name, module in modules.items():
        if (style := _style(name, module, plan, residual)) is not None:
            parallelize_module(module, mesh, style, src_data_rank=None)
    for block in plan.blocks:
        parallelize_module(modules[block], mesh, Block(residual), src_data_rank=None)
    for mixture in plan.mixtures:
        parallelize_module(modules[mixture], mesh, Mixture(residual), src_data_rank=None)
    if sequence_parallel:
        share_positions(modules[plan.layers[0]], modules[plan.layers[-1]], mesh, residual)


def _cut_vocabulary(model: PreTrainedModel, mesh: DeviceMesh, value: str) -> None:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, nn.Embedding) or type(head) is not nn.Linear:
        raise ModelError(
            f"{value}: embedding and head of {type(model).__name__} are {type(embedding).__name__} and "
            f"{type(head).__name__}, not a plain embedding and linear layer; set it to 1"
        )
    is_tied = head.weight is embedding.weight
    parallelize_module(embedding, mesh, VocabularyEmbedding(), src_data_rank=None)
    if is_tied:
        weight: Any = embedding.weight
        head.register_parameter("weight", weight)
    parallelize_module(head, mesh, VocabularyHead(), src_data_rank=None)


def _style(name: str, module: nn.Module, plan: TensorPlan, residual: Residual) -> ParallelStyle | None:
    """Return the style of a module with direct parameters that are not sharded yet, else None."""
    parameters = list(module.parameters(recurse=False))
    if not parameters or isinstance(parameters[0], DTensor):
        return None
    style = plan.styles.get(name)
    if name in plan.experts:
        return Experts()
    if any(inside(name, mixture) for mixture in plan.mixtures):
        # A shared expert's linear layer, or a router; gradients are partial sums.
        cut = {Style.COLUMNS: Shard(0), Style.ROWS: Shard(1)}.get(style) if style else None
        return Local(Replicate(), Partial()) if cut is None else Local(cut, cut)
    match style:
        case Style.COLUMNS:
            return ColwiseParallel()
        case Style.COLUMNS_GATHERED:
            return ColwiseParallel(output_layouts=Replicate())
        case Style.ROWS:
            return RowParallel(residual)
        case Style.ROWS_SPLIT:
            return RowParallel(residual, input_layouts=Replicate())
        case Style.PER_HEAD:
            return Local(Replicate(), Partial())
    in_layer = any(inside(name, layer) or name == layer for layer in plan.layers)
    in_block = any(inside(name, block) for block in plan.blocks)
    # Between blocks a rank may have only some of the positions.
    return Local(Replicate(), Partial() if residual.is_shared and in_layer and not in_block else Replicate())


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


def free_gathered(model: nn.Module) -> None:
    """Free gathered copies of parameters."""
    for unit in sharded_units(model):
        unit.reshard()


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
