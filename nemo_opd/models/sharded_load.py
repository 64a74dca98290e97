"""Loading of safetensors directly into a sharded model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from transformers import GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.finite import find_not_finite
from nemo_opd.distributed.shards import local
from nemo_opd.errors import ModelError
from nemo_opd.models.folder import resolve, safetensors_files, shards_in
from nemo_opd.models.fused_layers import fuse_layers
from nemo_opd.models.load import (
    build_on_meta,
    check_nothing_missing,
    load_config,
    load_model,
    not_finite,
    unreadable,
)
from nemo_opd.models.lora import Adapters, base_name, keep_adapters_only
from nemo_opd.models.parallelize import checkpoint_activations, compile_in_place, parallelize, sharded_units
from nemo_opd.progress import tracked

_COMPARED_ROWS = 1024
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""Types, as named by safetensors, of weights that are not quantised."""


class _NotPiecewiseError(Exception):
    """Signal that weights cannot be read piece by piece."""


@dataclass(frozen=True, slots=True)
class _Stored:
    """Tensor in a safetensors file."""

    file: Path
    name: str
    shape: torch.Size
    dtype: str
    """Name of the type in safetensors."""

    def read(self, tensors: Any, region: tuple[slice, ...]) -> Tensor:
        """Read a region of the tensor from the opened file."""
        part: Tensor = tensors.get_slice(self.name)[region] if region else tensors.get_tensor(self.name)
        return part


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
    before they are cut, where they are quantised, not in safetensors, or fused or split by transformers.

    key: `student.model` or `teachers.i.model`. trainable: False for a teacher. adapters: trained in place of the
    weights, to which `dtype` then applies; the model's state has adapters alone. fused_layers: see `fuse_layers`.
    attn_implementation: of transformers, whose default is None. Raises ModelError naming `key` where weights are
    unreadable or missing, on all ranks where one of them is NaN or infinite, and `….parallelism.tp` where the model
    cannot be cut.
    """

    def cut(model: PreTrainedModel) -> None:
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
        parallelize(model, mesh, parallelism, compute_dtype=compute_dtype, key=key.removesuffix(".model"))

    try:
        model = _streamed(reference, dtype, cut, device, key, attn_implementation)
    except _NotPiecewiseError:
        model = load_model(reference, dtype, key=key, attn_implementation=attn_implementation)
        cut(model)
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
    _require_piecewise(model, dtype)
    stored = _whole(model, reference, key)
    _require_equal_ties(model, stored)
    cut(model)
    model.to_empty(device=device)
    if not sharded_units(model):  # FSDP2 keeps tied weights tied, plain parameters are now different ones
        model.tie_weights()
    try:
        _fill(model, stored)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # safetensors and torch each raise their own
        raise unreadable(reference, error, key=key) from error
    _compute_buffers(model)
    with suppress(OSError):  # so that what is exported generates as what was loaded
        model.generation_config = GenerationConfig.from_pretrained(resolve(reference))
    return model


def check_weights(model: PreTrainedModel, reference: str, *, key: str) -> None:
    """Compare a model on meta with the headers of its files, where they are on this machine.

    Raises ModelError, naming `key`, for tensors that are missing, or of another shape or kind than the model's.
    """
    if Path(resolve(reference)).is_dir():
        with suppress(_NotPiecewiseError):
            _require_piecewise(model, model.dtype)
            _whole(model, reference, key)


def _whole(model: PreTrainedModel, reference: str, key: str) -> dict[str, _Stored]:
    """Find all tensors of the model in its files. Raises ModelError, and _NotPiecewiseError as `_stored` does."""
    try:
        stored = _stored(model, _weight_files(reference))
    except _NotPiecewiseError:
        raise
    except Exception as error:  # safetensors, the hub and transformers each raise their own
        raise unreadable(reference, error, key=key) from error
    check_nothing_missing(reference, _missing(model, stored), key=key)
    return stored


def _require_piecewise(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raise _NotPiecewiseError for a model that transformers' own loading would change."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise _NotPiecewiseError
    keeps_fp32 = getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    if keeps_fp32 and dtype != torch.float32:
        raise _NotPiecewiseError
    buffers = {id(buffer) for buffer in model.buffers()}
    for module in model.modules():
        # Tensors that are neither parameters nor buffers would stay on meta.
        if any(isinstance(value, Tensor) and id(value) not in buffers for value in vars(module).values()):
            raise _NotPiecewiseError


def _weight_files(reference: str) -> list[Path]:
    """Return the files of a model's weights. Raises _NotPiecewiseError where there are no safetensors."""
    source = resolve(reference)
    files = safetensors_files(Path(source)) if Path(source).is_dir() else _hub_files(source)
    if not files:
        raise _NotPiecewiseError
    return files


def _hub_files(name: str) -> list[Path]:
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (single := cached_file(name, SAFE_WEIGHTS_NAME, **options)) is not None:
        return [Path(single)]
    if (index := cached_file(name, SAFE_WEIGHTS_INDEX_NAME, **options)) is None:
        return []
    shards_in(Path(index))  # refuses names of files elsewhere
    files, _ = get_checkpoint_shard_files(name, index)
    return [Path(file) for file in files]


def _stored(model: PreTrainedModel, files: list[Path]) -> dict[str, _Stored]:
    """Find the parameters and buffers of a model on meta, by name in the model; other tensors are ignored.

    Raises _NotPiecewiseError where transformers would fuse or split tensors, and ValueError for a tensor of another
    shape or kind.
    """
    mapping = get_model_conversion_mapping(model)
    expected = model.state_dict()
    stored: dict[str, _Stored] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                target = _target(name, mapping, model.base_model_prefix, expected)
                if target in expected:
                    about = tensors.get_slice(name)
                    stored[target] = _Stored(file, name, torch.Size(about.get_shape()), about.get_dtype())
    # Renamed weights get their old names in exports. Older versions of transformers do not have `was_used`.
    used: Any = [each for each in mapping if not hasattr(each, "was_used") or each.was_used()]
    model._weight_conversions = used
    for name, each in stored.items():
        if each.shape != expected[name].shape:
            raise ValueError(f"{each.name} is {list(each.shape)}, the model has {list(expected[name].shape)}")
        if expected[name].is_floating_point() and each.dtype not in _FLOATS:
            raise ValueError(f"{each.name} is of type {each.dtype}, and config.json has no quantization_config for it")
    return stored


def _require_equal_ties(model: PreTrainedModel, stored: dict[str, _Stored]) -> None:
    """Raise _NotPiecewiseError where tied weights differ, which transformers would then leave untied."""
    for target, source in model.all_tied_weights_keys.items():
        if target in stored and source in stored and not _are_equal(stored[target], stored[source]):
            raise _NotPiecewiseError


def _target(name: str, mapping: list[Any], prefix: str, expected: dict[str, Tensor]) -> str:
    """Return the name in the model of a file's tensor, by transformers' rules. Raises _NotPiecewiseError."""
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    target, converter = rename_source_key(name, renamings, converters, prefix, expected)
    if target not in expected and name in expected:
        target, converter = rename_source_key(name, [], [], prefix, expected)
    if converter is not None:
        raise _NotPiecewiseError
    return str(target)


def _are_equal(left: _Stored, right: _Stored) -> bool:
    rows = left.shape[0]
    parts = ((slice(start, min(start + _COMPARED_ROWS, rows)),) for start in range(0, rows, _COMPARED_ROWS))
    with safe_open(left.file, framework="pt") as own, safe_open(right.file, framework="pt") as other:
        return all(torch.equal(left.read(own, part), right.read(other, part)) for part in parts)


def _missing(model: PreTrainedModel, stored: dict[str, _Stored]) -> list[str]:
    """Return names that no file has, except those tied to stored ones and those that the model does not need."""
    tied: dict[str, str] = model.all_tied_weights_keys
    sources = {tied[name] for name in stored if name in tied} | set(stored)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    return sorted(
        name
        for name in model.state_dict()
        if name not in sources and tied.get(name) not in sources and not any(each.search(name) for each in ignored)
    )


@torch.no_grad()
def _fill(model: nn.Module, stored: dict[str, _Stored]) -> None:
    """Read this rank's part of each parameter and buffer of a model that is already cut; shapes are known to fit."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    by_file = sorted(stored, key=lambda name: stored[name].file)
    for file, names in groupby(tracked(by_file, "reading weights", "tensors"), key=lambda name: stored[name].file):
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                tensor = own[base_name(model, name)]
                shard = local(tensor)
                if shard.numel():
                    shard.copy_(stored[name].read(tensors, _own_region(tensor)))


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
