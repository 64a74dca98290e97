"""Loading of safetensors directly into a sharded model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import groupby
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import GenerationConfig, PreTrainedModel

from nemo_opd.config.model import Model, Student
from nemo_opd.distributed.collectives import find_not_finite, local
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
    settings: Model,
    dtype: torch.dtype,
    mesh: DeviceMesh,
    *,
    key: str,
    compute_dtype: torch.dtype,
    device: str,
    trainable: bool,
    adapters: Adapters | None = None,
) -> PreTrainedModel:
    """Load a causal language model with weights in `dtype`, sharded over `mesh`, with this rank's shard on `device`.

    The model is built and sharded on meta; then each rank reads its part of each tensor, so that it holds only its
    shard and the part being read. Communicates only whether weights are finite. Every rank loads the full weights first
    if they are quantised, not in safetensors, or converted by transformers in other ways than stacking (experts) or
    concatenating stored tensors.

    key: `student.model` or `teachers.i.model`. trainable: False for a teacher. adapters: trained instead of the
    weights, to which `dtype` applies; the model's state dict then has only adapters. Raises ModelError naming `key` if
    weights are unreadable or missing, are quantised in a way that does not allow this, or (on all ranks) one is NaN or
    infinite, and naming `….parallelism.tp` if the model cannot be sharded.
    """
    reference, section = settings.reference, key.removesuffix(".model")

    def prepare(model: PreTrainedModel, *, stays_whole: bool = False) -> None:
        model.eval().requires_grad_(trainable)
        if adapters is not None:
            adapters.attach(model)
            keep_adapters_only(model)
        if isinstance(settings, Student) and settings.activation_checkpointing:
            checkpoint_activations(model)
        if settings.compile:
            compile_in_place(model)
        else:
            fuse_layers(model, settings.fused_layers, compute_dtype, mesh.device_type, key=section)
        if not stays_whole:
            parallelize(model, mesh, settings.parallelism, compute_dtype=compute_dtype, key=section)

    try:
        model = _load_by_pieces(settings, dtype, prepare, device, key)
    except NotPiecewiseError:
        config = load_config(reference, key=key)
        stays_quantised = is_kept(config, mesh, device, key=key, reference=reference, trainable=trainable)
        quantised_on = device if stays_quantised else None
        attention = settings.attn_implementation
        model = load_model(reference, dtype, key=key, attn_implementation=attention, quantised_on=quantised_on)
        prepare(model, stays_whole=stays_quantised)
        if not stays_quantised:
            model.to(device)  # type: ignore[arg-type]
    if adapters is not None:
        _copy_shards(model, adapters.initial_values(model))
    # With offload shards are in host memory, but collectives run on the device.
    if (values := find_not_finite(dict(model.named_parameters()), device=mesh.device_type)) is not None:
        raise not_finite(reference, values, dtype, key=key)
    return model


def _load_by_pieces(
    settings: Model, dtype: torch.dtype, prepare: Callable[[PreTrainedModel], None], device: str, key: str
) -> PreTrainedModel:
    """Build a model on meta, shard it with `prepare`, and read its weights. Raises NotPiecewiseError and ModelError."""
    reference, attention = settings.reference, settings.attn_implementation
    config = load_config(reference, key=key)
    model = build_on_meta(config, reference, key=key, attn_implementation=attention, dtype=dtype)
    require_piecewise(model, dtype)
    pieces = find_pieces(model, reference, key=key)
    require_equal_ties(model, pieces)
    prepare(model)
    model.to_empty(device=device)
    if not sharded_units(model):  # FSDP2 keeps weights tied, but `to_empty` unties plain parameters
        model.tie_weights()
    try:
        _fill(model, pieces)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # safetensors and torch each raise their own
        raise unreadable(reference, error, key=key) from error
    _compute_buffers(model)
    with suppress(OSError):  # so that an export has the generation settings of the loaded model
        model.generation_config = GenerationConfig.from_pretrained(resolve(reference))
    return model


@torch.no_grad()
def _fill(model: nn.Module, pieces: dict[str, list[Piece]]) -> None:
    """Read this rank's part of each parameter and buffer of a sharded model, whose shapes were checked before."""
    state = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    named_pieces = [(name, piece) for name, parts in pieces.items() for piece in parts]
    named_pieces.sort(key=lambda pair: pair[1].stored.file)
    reading = tracked(named_pieces, "reading weights", "tensors")
    for file, in_file in groupby(reading, key=lambda pair: pair[1].stored.file):
        with safe_open(file, framework="pt") as tensors:
            for name, piece in in_file:
                tensor = state[base_name(model, name)]
                if (overlap := piece.overlap(_local_region(tensor))) is not None:
                    target, source = overlap
                    local(tensor)[target].copy_(piece.stored.read(tensors, source))


@torch.no_grad()
def _copy_shards(model: nn.Module, values: Iterator[tuple[str, Tensor]]) -> None:
    """Copy this rank's part of full parameter values into the model."""
    parameters = dict(model.named_parameters())
    for name, value in values:
        local(parameters[name]).copy_(value[_local_region(parameters[name])])


def _local_region(tensor: Tensor) -> tuple[slice, ...]:
    """Return this rank's region of the full tensor, one slice per dimension."""
    if not isinstance(tensor, DTensor):
        return tuple(slice(0, size) for size in tensor.shape)
    sizes, begins = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(slice(begin, begin + size) for size, begin in zip(sizes, begins, strict=True))


def _compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that checkpoints do not store, such as rotary frequencies, as transformers does.

    Raises ModelError for a model without code to compute them.
    """
    computed = dict(model.named_non_persistent_buffers())
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
    unset = sorted(name for name, buffer in model.named_non_persistent_buffers() if buffer.isnan().any())
    if unset:
        raise ModelError(
            f"{type(model).__name__} does not say how {', '.join(unset[:3])} are computed; name another model"
        )
