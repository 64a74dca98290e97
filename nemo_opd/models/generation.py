"""A model as it is trained, made fit to generate with."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from nemo_opd.distributed.mesh import context_axis, tensor_axis
from nemo_opd.logits.product import linear
from nemo_opd.models.head import local, replaced_forward
from nemo_opd.models.tensor_styles import whole_positions

WHOLE_SEQUENCES = "sdpa"
"""transformers' name of the attention that takes a mask and a cache, in place of that over a group's positions."""


@contextmanager
def generating(model: PreTrainedModel, mesh: DeviceMesh | None, *, rounds_logits: bool = False) -> Iterator[None]:
    """Inside, each rank can call the model's `generate`; afterwards it is as it was, in its modes and its shards.

    The model is as `load_sharded` made it over `mesh`, adapters, checkpointed activations and compiled layers
    included, or a plain one, with None. Inside it is in eval mode, records no gradients, has layers that are
    not compiled, and computes in FSDP2's `param_dtype`. Parameters must not change. Its logits have the digits of those
    that losses make from hidden states, since ratios of probabilities are taken between the two; rounds_logits: those
    of the model's own, as losses read them with handoff=logits.

    Communicates an all-gather of all parameters on entering, each rank holding them whole meanwhile, in
    `param_dtype`; tensor-parallel ones stay cut over their group. Inside, data-parallel ranks, and those of a
    context-parallel group, take their steps apart, with whatever sequences they have. The ranks of a tensor-parallel
    group keep step: they must be given the same sequences, and get the same whole rows of logits, for which they
    gather columns at every step. All have all positions, for one new position cannot be shared. Nothing is sent on
    leaving.
    """
    with ExitStack() as inside:
        inside.enter_context(torch.no_grad())
        inside.enter_context(evaluating(model))
        inside.enter_context(not_compiled(model))
        if mesh is not None and context_axis(mesh) is not None:
            inside.enter_context(attention_of(model, WHOLE_SEQUENCES))
        inside.enter_context(gathered_parameters(model))
        if not rounds_logits:
            inside.enter_context(fp32_logits(model))
        if mesh is not None and (tensor := tensor_axis(mesh)) is not None:
            inside.enter_context(whole_positions())
            inside.enter_context(whole_logits(model, tensor))
        yield


@contextmanager
def evaluating(model: PreTrainedModel) -> Iterator[None]:
    """Inside, no dropout; and a cache also where activations are checkpointed, which transformers does in training."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


@contextmanager
def not_compiled(model: PreTrainedModel) -> Iterator[None]:
    """Inside, layers run as they are written: with a cache that grows they would be compiled time and again."""
    compiled: list[tuple[Any, Any]] = [
        (module, module._compiled_call_impl) for module in model.modules() if module._compiled_call_impl is not None
    ]
    for module, _ in compiled:
        module._compiled_call_impl = None
    try:
        yield
    finally:
        for module, call in compiled:
            module._compiled_call_impl = call


@contextmanager
def attention_of(model: PreTrainedModel, name: str) -> Iterator[None]:
    before: Any = model.config._attn_implementation
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


@contextmanager
def gathered_parameters(model: PreTrainedModel) -> Iterator[None]:
    """Inside, what FSDP2 has sharded is whole, so that forward passes communicate nothing of it."""
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    outermost: Any = model
    try:
        for unit in units:
            unit.set_reshard_after_forward(False, recurse=False)
            unit.unshard()
        yield
    finally:
        for unit in units:
            # As `fully_shard` has it by default: the outermost is needed first in backward.
            unit.set_reshard_after_forward(unit is not outermost, recurse=False)
            unit.reshard()


@contextmanager
def fp32_logits(model: PreTrainedModel) -> Iterator[None]:
    """Inside, the head's output is not rounded to bf16 or fp16; of one that is no linear layer it is as it was."""
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
def whole_logits(model: PreTrainedModel, tensor: DeviceMesh) -> Iterator[None]:
    """Inside, a head whose rows are cut over the ranks gives all columns on each. Communicates [B, S, V] a call."""
    head: Any = model.get_output_embeddings()
    of_shard, width = head.forward, head.weight.shape[0]

    def gathered(hidden: Tensor) -> Tensor:
        own: Tensor = of_shard(hidden)
        shape = torch.Size((*own.shape[:-1], width))
        # Said, since parts that are not equal do not tell.
        stride = torch.empty(shape, device="meta").stride()
        cut = DTensor.from_local(own, tensor, [Shard(own.ndim - 1)], run_check=False, shape=shape, stride=stride)
        return cut.full_tensor()

    with replaced_forward(head, gathered):
        yield
