"""Tensor parallelism with torch's styles, selected by transformers' plans, so that it composes with FSDP2."""

from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, parallelize_module
from transformers import PreTrainedModel

from nemo_opd.errors import ModelError
from nemo_opd.models.tensor_plan import Style, TensorPlan, inside, tensor_plan
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


def cut_over_ranks(model: PreTrainedModel, mesh: DeviceMesh, *, sequence_parallel: bool, key: str) -> None:
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
        return _in_mixture(style)
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


def _in_mixture(style: Style | None) -> ParallelStyle:
    """Return the style of a shared expert's linear layer, or of a router, whose gradients are partial sums."""
    match style:
        case Style.COLUMNS:
            return Local(Shard(0), Shard(0))
        case Style.ROWS:
            return Local(Shard(1), Shard(1))
    return Local(Replicate(), Partial())
