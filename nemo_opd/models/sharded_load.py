"""Loading of safetensors directly into a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import GenerationConfig, PreTrainedModel

from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.finite import find_not_finite
from nemo_opd.distributed.shards import local
from nemo_opd.errors import ModelError
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.fused_layers import fuse_layers
from nemo_opd.models.load import (
    build_on_meta,
    load_config,
    load_model,
    not_finite,
    unreadable,
)
from nemo_opd.models.lora import Adapters, base_name, keep_adapters_only
from nemo_opd.models.parallelize import checkpoint_activations, compile_in_place, parallelize, sharded_units
from nemo_opd.models.quantised import is_kept
from nemo_opd.models.stored_weights import (
    NotPiecewiseError,
    Piece,
    find_pieces,
    require_equal_ties,
    require_piecewise,
)
from nemo_opd.progress import tracked


def load_sharded(
    reference: str,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    *,
    key: str,
    parallelism: Parallelism,
    compute_dtype: torch.dtype,
    device: str,
    trainable: bool,
    activation_checkpointing: bool = False,
    compile_layers: bool = False,
    fused_layers: bool | Literal["auto"] = False,
    adapters: Adapters | None = None,
    attn_implementation: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model with weights in `dtype`, cut over `mesh`, with this rank's shard on `device`.

    The model is built and cut on meta; then each tensor's part is read from its file, so that a rank holds no more than
    its shard and the part being read. Communicates only whether weights are finite. Every rank loads weights whole,
    before they are cut, where they are quantised, not in safetensors, or made by transformers of stored ones in another
    way than by stacking (experts) or joining them.

    key: `student.model` or `teachers.i.model`. trainable: False for a teacher. adapters: trained in place of the
    weights, to which `dtype` then applies; the model's state has adapters alone. fused_layers: see `fuse_layers`.
    attn_implementation: of transformers, whose default is None. Raises ModelError naming `key` where weights are
    unreadable or missing, on all ranks where one of them is NaN or infinite, where they are quantised in a way that
    does not allow this, and `….parallelism.tp` where the model cannot be cut.
    """

    def cut(model: PreTrainedModel, *, stays_whole: bool = False) -> None:
        model.eval().requires_grad_(trainable)
        if adapters is not None:
            adapters.attach(model)
            keep_adapters_only(model)
        if activation_checkpointing:
            checkpoint_activations(model)
        if compile_layers:
            compile_in_place(model)
        else:
            fuse_layers(model, fused_layers, compute_dtype, mesh.device_type, key=key.removesuffix(".model"))
        if not stays_whole:
            parallelize(model, mesh, parallelism, compute_dtype=compute_dtype, key=key.removesuffix(".model"))

    try:
        model = _streamed(reference, dtype, cut, device, key, attn_implementation)
    except NotPiecewiseError:
        config = load_config(reference, key=key)
        stays = is_kept(config, mesh, device, key=key, reference=reference, trainable=trainable)
        on = device if stays else None
        model = load_model(reference, dtype, key=key, attn_implementation=attn_implementation, quantised_on=on)
        cut(model, stays_whole=stays)
        if not stays:
            model.to(device)  # type: ignore[arg-type]
    if adapters is not None:
        _put(model, adapters.initial_values(model))
    # With offload shards are in host memory, but collectives are on the device.
    if (found := find_not_finite(dict(model.named_parameters()), device=mesh.device_type)) is not None:
        raise not_finite(reference, found, dtype, key=key)
    return model


def _streamed(
    reference: str,
    dtype: torch.dtype,
    cut: Callable[[PreTrainedModel], None],
    device: str,
    key: str,
    attn_implementation: str | None,
) -> PreTrainedModel:
    config = load_config(reference, key=key)
    model = build_on_meta(config, reference, key=key, attn_implementation=attn_implementation, dtype=dtype)
    require_piecewise(model, dtype)
    pieces = find_pieces(model, reference, key=key)
    require_equal_ties(model, pieces)
    cut(model)
    model.to_empty(device=device)
    if not sharded_units(model):  # FSDP2 keeps tied weights tied, plain parameters are now different ones
        model.tie_weights()
    try:
        _fill(model, pieces)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # safetensors and torch each raise their own
        raise unreadable(reference, error, key=key) from error
    _compute_buffers(model)
    with suppress(OSError):  # so that what is exported generates as what was loaded
        model.generation_config = GenerationConfig.from_pretrained(resolve(reference))
    return model


@torch.no_grad()
def _fill(model: nn.Module, pieces: dict[str, list[Piece]]) -> None:
    """Read this rank's part of each parameter and buffer of a model that is already cut; shapes are known to fit."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    each_piece = [(name, piece) for name, parts in pieces.items() for piece in parts]
    each_piece.sort(key=lambda pair: pair[1].stored.file)
    reading = tracked(each_piece, "reading weights", "tensors")
    for file, in_file in groupby(reading, key=lambda pair: pair[1].stored.file):
        with safe_open(file, framework="pt") as tensors:
            for name, piece in in_file:
                tensor = own[base_name(model, name)]
                if (overlap := piece.overlap(_own_region(tensor))) is not None:
                    target, source = overlap
                    local(tensor)[target].copy_(piece.stored.read(tensors, source))


@torch.no_grad()
def _put(model: nn.Module, values: Iterator[tuple[str, Tensor]]) -> None:
    """Copy this rank's part of whole parameters into the model, by name."""
    own = dict(model.named_parameters())
    for name, whole in values:
        local(own[name]).copy_(whole[_own_region(own[name])])


def _own_region(tensor: Tensor) -> tuple[slice, ...]:
    """Return which part of the whole tensor this rank has: one slice a dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for size, begin in zip(sizes, begins, strict=True))


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, such as rotary frequencies, as transformers does after loading.

    Raises ModelError for a model without code for that.
    """
    computed = dict(_computed_buffers(model))
    owners = {name.rpartition(".")[0] for name in computed}
    for name, module in model.named_modules():
        module._is_hf_initialized = name not in owners
    computed_ids = {id(buffer) for buffer in computed.values()}
    tensor: Any
    for tensor in (*model.parameters(), *model.buffers()):
        tensor._is_hf_initialized = id(tensor) not in computed_ids
    for buffer in computed.values():
        if buffer.is_floating_point():
            buffer.fill_(torch.nan)
    model.initialize_weights()
    unset = sorted(name for name, buffer in _computed_buffers(model) if buffer.isnan().any())
    if unset:
        raise ModelError(
            f"{type(model).__name__} does not say how {', '.join(unset[:3])} are computed; name another model"
        )


def _computed_buffers(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    for name, buffer in model.named_buffers():
        owner, _, own = name.rpartition(".")
        if own in model.get_submodule(owner)._non_persistent_buffers_set:
            yield name, buffer
