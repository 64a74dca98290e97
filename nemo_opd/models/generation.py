"""Generation with the model that is being trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from nemo_opd.distributed.collectives import local
from nemo_opd.distributed.process_group import context_axis, tensor_axis
from nemo_opd.logits.head import linear
from nemo_opd.models.causal_model import replaced_forward
from nemo_opd.models.parallelize import sharded_units
from nemo_opd.models.tensor_styles import whole_positions

_WHOLE_SEQUENCES = "sdpa"
"""transformers' name of an attention with mask and cache, which replaces ring attention."""


@contextmanager
def generating(
    model: PreTrainedModel,
    mesh: DeviceMesh | None,
    *,
    rounds_logits: bool = False,
    reshard_after_forward: bool = True,
) -> Iterator[None]:
    """Prepare the model so that each rank can call its `generate` inside; restore modes and shards afterwards.

    The model is from `load_sharded` over `mesh`, possibly with adapters, checkpointed activations and compiled layers,
    or a plain model if `mesh` is None. Inside it is in eval mode, records no gradients, runs layers uncompiled, and
    computes in FSDP2's `param_dtype`. Parameters must not change. By default logits have the precision of the logits
    that losses compute from hidden states, since losses take probability ratios between the two; rounds_logits: they
    have the model's precision, as with handoff=logits. reshard_after_forward: the model's setting, to restore it.

    Communicates an all-gather of all parameters on entering; each rank then holds them in full in `param_dtype`, except
    that tensor-parallel parameters stay sharded over their group. Inside, data- and context-parallel ranks run
    independently, each with its own sequences. The ranks of a tensor-parallel group must get the same sequences, and
    get the same full rows of logits, for which they gather columns at every step. All ranks have all positions, since
    one new position cannot be sharded. Nothing is sent on leaving.
    """
    with torch.no_grad(), ExitStack() as inside:
        inside.callback(model.train, model.training)
        model.eval()  # without dropout, and without activation checkpointing, which would prevent a cache
        for module in model.modules():  # uncompiled: a growing cache would recompile layers again and again
            if (compiled := module._compiled_call_impl) is not None:
                inside.callback(setattr, module, "_compiled_call_impl", compiled)
                module._compiled_call_impl = None
        if mesh is not None and context_axis(mesh) is not None:
            inside.callback(model.set_attn_implementation, model.config._attn_implementation)
            model.set_attn_implementation(_WHOLE_SEQUENCES)
        inside.enter_context(_gathered_parameters(model, reshard_after_forward))
        head: Any = model.get_output_embeddings()
        if not rounds_logits and type(head) is nn.Linear:
            inside.enter_context(replaced_forward(head, partial(_fp32_logits, head)))
        if mesh is not None and (tensor := tensor_axis(mesh)) is not None:
            inside.enter_context(whole_positions())
            whole = partial(_whole_logits, head.forward, head.weight.shape[0], tensor)
            inside.enter_context(replaced_forward(head, whole))
        yield


@contextmanager
def _gathered_parameters(model: PreTrainedModel, reshard_after_forward: bool) -> Iterator[None]:
    """Keep FSDP2's parameters gathered inside, so that forward passes communicate none."""
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


def _fp32_logits(head: nn.Linear, hidden: Tensor) -> Tensor:
    """Compute a linear head's output in at least fp32, instead of rounding it to bf16 or fp16."""
    bias = None if head.bias is None else local(head.bias)
    return linear(hidden.flatten(0, -2), local(head.weight), bias).unflatten(0, hidden.shape[:-1])


def _whole_logits(forward: Callable[[Tensor], Tensor], width: int, tensor: DeviceMesh, hidden: Tensor) -> Tensor:
    """Gather the columns of a sharded head's output on each rank. Communicates [B, S, V]."""
    logits = forward(hidden)
    shape = torch.Size((*logits.shape[:-1], width))
    # Uneven shards do not determine the full shape and stride.
    stride = torch.empty(shape, device="meta").stride()
    placements = [Shard(logits.ndim - 1)]
    sharded = DTensor.from_local(logits, tensor, placements, run_check=False, shape=shape, stride=stride)
    return sharded.full_tensor()
