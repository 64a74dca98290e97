"""Generation with a model that is being trained."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from nemo_opd.distributed.mesh import context_axis, tensor_axis
from nemo_opd.distributed.shards import local
from nemo_opd.logits.product import linear
from nemo_opd.models.head import replaced_forward
from nemo_opd.models.parallelize import sharded_units
from nemo_opd.models.tensor_styles import whole_positions

_WHOLE_SEQUENCES = "sdpa"
"""Name in transformers of an attention with mask and cache, in place of ring attention."""


@contextmanager
def generating(
    model: PreTrainedModel,
    mesh: DeviceMesh | None,
    *,
    rounds_logits: bool = False,
    reshard_after_forward: bool = True,
) -> Iterator[None]:
    """Let each rank call the model's `generate` inside; afterwards modes and shards are restored.

    The model is from `load_sharded` over `mesh`, possibly with adapters, checkpointed activations and compiled layers,
    or a plain one, with None. Inside it is in eval mode, records no gradients, runs layers uncompiled, and computes in
    FSDP2's `param_dtype`. Parameters must not change. Its logits have the precision of those that losses compute from
    hidden states, since ratios of probabilities are taken between the two; rounds_logits: the precision of the
    model's own, which losses read with handoff=logits. reshard_after_forward: that of the model.

    Communicates an all-gather of all parameters on entering, which each rank then holds whole in `param_dtype`;
    tensor-parallel ones stay cut over their group. Inside, data- and context-parallel ranks run independently, each
    with its own sequences. The ranks of a tensor-parallel group must be given the same sequences, and get the same
    whole rows of logits, for which they gather columns at every step. All ranks have all positions, since one new
    position cannot be shared. Nothing is sent on leaving.
    """
    with torch.no_grad(), ExitStack() as inside:
        inside.callback(model.train, model.training)
        model.eval()  # without dropout, and without activation checkpointing, which would prevent a cache
        _disable_compilation(model, inside)
        if mesh is not None and context_axis(mesh) is not None:
            inside.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation(_WHOLE_SEQUENCES)
        inside.enter_context(_gathered_parameters(model, reshard_after_forward))
        if not rounds_logits:
            inside.enter_context(_fp32_logits(model))
        if mesh is not None and (tensor := tensor_axis(mesh)) is not None:
            inside.enter_context(whole_positions())
            inside.enter_context(_whole_logits(model, tensor))
        yield


def _disable_compilation(model: PreTrainedModel, until: ExitStack) -> None:
    """Run layers uncompiled: with a growing cache they would be recompiled again and again."""
    for module in model.modules():
        if (compiled := module._compiled_call_impl) is not None:
            until.callback(setattr, module, "_compiled_call_impl", compiled)
            module._compiled_call_impl = None


@contextmanager
def _gathered_parameters(model: PreTrainedModel, reshard_after_forward: bool) -> Iterator[None]:
    """Hold FSDP2's parameters whole inside, so that forward passes communicate none."""
    units = sharded_units(model)
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit in units:
            unit.set_reshard_after_forward(reshard_after_forward and unit is not units[0], recurse=False)
            unit.reshard()


@contextmanager
def _fp32_logits(model: PreTrainedModel) -> Iterator[None]:
    """Keep the output of a linear head from being rounded to bf16 or fp16 inside."""
    head: Any = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        yield
        return

    def forward(hidden: Tensor) -> Tensor:
        bias = None if head.bias is None else local(head.bias)
        return linear(hidden.flatten(0, -2), local(head.weight), bias).unflatten(0, hidden.shape[:-1])

    with replaced_forward(head, forward):
        yield


@contextmanager
def _whole_logits(model: PreTrainedModel, tensor: DeviceMesh) -> Iterator[None]:
    """Gather the columns of a sharded head on each rank inside. Communicates [B, S, V] a call."""
    head: Any = model.get_output_embeddings()
    of_shard, width = head.forward, head.weight.shape[0]

    def gathered(hidden: Tensor) -> Tensor:
        own: Tensor = of_shard(hidden)
        shape = torch.Size((*own.shape[:-1], width))
        # Unequal parts do not determine shape and stride.
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(own, tensor, [Shard(own.ndim - 1)], run_check=False, shape=shape, stride=stride)
        return cut.full_tensor()

    with replaced_forward(head, gathered):
        yield
