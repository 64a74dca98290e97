"""Weights read from safetensors straight into a sharded model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
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
from nemo_opd.models.load import (
    build_on_meta,
    check_nothing_missing,
    load_config,
    load_model,
    not_finite,
    unreadable,
)
from nemo_opd.models.lora import Adapters, base_name, keep_adapters_only
from nemo_opd.models.parallelize import checkpoint_activations, compile_in_place, parallelize
from nemo_opd.models.tensor_styles import part_of
from nemo_opd.progress import tracked

COMPARED_ROWS = 1024
FLOATS = {"F64", "F32", "F16", "BF16"}
"""What safetensors calls the types of weights that are no codes of quantised ones."""


class NotPiecewiseError(Exception):
    """These weights cannot be read piece by piece."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    shape: torch.Size
    dtype: str
    """By its name in safetensors."""

    def read(self, tensors: Any, region: tuple[slice, ...]) -> Tensor:
        """From the opened file: this part of the tensor, and no more."""
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
    adapters: Adapters | None = None,
) -> PreTrainedModel:
    """A causal language model with weights in `dtype`, cut over `mesh`, of which this rank has its shard on `device`.

    It is built on meta and cut there; then each tensor's part is read from its file, so that a rank holds no more than
    its shard and the part being read. Nothing is sent but whether weights are finite. Weights that are
    quantised, not in safetensors, or fused or split by transformers as it loads them are loaded whole by every rank
    before they are cut.

    key: `student.model` or `teachers.i.model`. trainable: False for a teacher. adapters: to be trained in place of the
    weights, which `dtype` is then for; the model's state is theirs alone. Raises ModelError naming `key` where
    weights are unreadable or missing, on all ranks where one of them is NaN or infinite, and `….parallelism.tp` where
    the model cannot be cut.
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
        parallelize(model, mesh, parallelism, compute_dtype=compute_dtype, key=key.removesuffix(".model"))

    try:
        model = _streamed(reference, dtype, cut, device, key)
    except NotPiecewiseError:
        model = load_model(reference, dtype, key=key)
        cut(model)
        model.to(device)  # type: ignore[arg-type]
    if adapters is not None:
        put(model, adapters.initial_values(model))
    # With offload the shards are in host memory, and the group's collectives are on the device all the same.
    if (found := find_not_finite(dict(model.named_parameters()), device=mesh.device_type)) is not None:
        raise not_finite(reference, found, dtype, key=key)
    return model


def _streamed(
    reference: str, dtype: torch.dtype, cut: Callable[[PreTrainedModel], None], device: str, key: str
) -> PreTrainedModel:
    config = load_config(reference, key=key)
    model = build_on_meta(config, reference, key=key, dtype=dtype)
    _require_piecewise(model, dtype)
    stored = _whole(model, reference, key)
    _require_equal_ties(model, stored)
    cut(model)
    model.to_empty(device=device)
    try:
        fill(model, stored)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # safetensors and torch each raise their own
        raise unreadable(reference, error, key=key) from error
    compute_buffers(model)
    _take_generation_config(model, reference)
    return model


def check_weights(model: PreTrainedModel, reference: str, *, key: str) -> None:
    """Compare a model on meta with the headers of its files, where these are on this machine.

    Raises ModelError, naming `key`, for tensors that are missing, or of another shape or kind than the model's.
    """
    if Path(resolve(reference)).is_dir():
        with suppress(NotPiecewiseError):
            _require_piecewise(model, model.dtype)
            _whole(model, reference, key)


def _whole(model: PreTrainedModel, reference: str, key: str) -> dict[str, Stored]:
    """Where all that the model needs is. Raises ModelError, and NotPiecewiseError as `_stored` does."""
    try:
        stored = _stored(model, _weight_files(reference))
    except NotPiecewiseError:
        raise
    except Exception as error:  # safetensors, the hub and transformers each raise their own
        raise unreadable(reference, error, key=key) from error
    check_nothing_missing(reference, _missing(model, stored), key=key)
    return stored


def _require_piecewise(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raises NotPiecewiseError for a model of which transformers' own loading would make something else."""
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotPiecewiseError
    keeps_fp32 = getattr(model, "_keep_in_fp32_modules", None) or getattr(model, "_keep_in_fp32_modules_strict", None)
    if keeps_fp32 and dtype != torch.float32:
        raise NotPiecewiseError
    buffers = {id(buffer) for buffer in model.buffers()}
    for module in model.modules():
        # What is neither parameter nor buffer would stay on meta.
        if any(isinstance(value, Tensor) and id(value) not in buffers for value in vars(module).values()):
            raise NotPiecewiseError


def _weight_files(reference: str) -> list[Path]:
    """Raises NotPiecewiseError where there are no safetensors."""
    source = resolve(reference)
    files = safetensors_files(Path(source)) if Path(source).is_dir() else _hub_files(source)
    if not files:
        raise NotPiecewiseError
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


def _stored(model: PreTrainedModel, files: list[Path]) -> dict[str, Stored]:
    """Where each parameter and buffer of a model on meta is, by its name in the model; what it lacks is ignored.

    Raises NotPiecewiseError where transformers would fuse or split tensors, and ValueError for a tensor of another
    shape or kind.
    """
    mapping = get_model_conversion_mapping(model)
    expected = model.state_dict()
    stored: dict[str, Stored] = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (it is no dict)
                target = _target(name, mapping, model.base_model_prefix, expected)
                if target in expected:
                    about = tensors.get_slice(name)
                    stored[target] = Stored(file, name, torch.Size(about.get_shape()), about.get_dtype())
    # What has been renamed is given its old name when the model is exported. Older versions do not tell what has been.
    used: Any = [each for each in mapping if not hasattr(each, "was_used") or each.was_used()]
    model._weight_conversions = used
    for name, each in stored.items():
        if each.shape != expected[name].shape:
            raise ValueError(f"{each.name} is {list(each.shape)}, the model has {list(expected[name].shape)}")
        if expected[name].is_floating_point() and each.dtype not in FLOATS:
            raise ValueError(f"{each.name} is of type {each.dtype}, and config.json has no quantization_config for it")
    return stored


def _require_equal_ties(model: PreTrainedModel, stored: dict[str, Stored]) -> None:
    """Raises NotPiecewiseError where transformers would leave tied weights apart, since they differ."""
    for target, source in model.all_tied_weights_keys.items():
        if target in stored and source in stored and not _are_equal(stored[target], stored[source]):
            raise NotPiecewiseError


def _target(name: str, mapping: list[Any], prefix: str, expected: dict[str, Tensor]) -> str:
    """The name in the model of what a file has under `name`, by transformers' rules. Raises NotPiecewiseError."""
    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    target, converter = rename_source_key(name, renamings, converters, prefix, expected)
    if target not in expected and name in expected:
        target, converter = rename_source_key(name, [], [], prefix, expected)
    if converter is not None:
        raise NotPiecewiseError
    return str(target)


def _are_equal(left: Stored, right: Stored) -> bool:
    rows = left.shape[0]
    parts = ((slice(start, min(start + COMPARED_ROWS, rows)),) for start in range(0, rows, COMPARED_ROWS))
    with safe_open(left.file, framework="pt") as own, safe_open(right.file, framework="pt") as other:
        return all(torch.equal(left.read(own, part), right.read(other, part)) for part in parts)


def _missing(model: PreTrainedModel, stored: dict[str, Stored]) -> list[str]:
    """Names that no file has, but those that are tied to what one has, or that the model can do without."""
    tied: dict[str, str] = model.all_tied_weights_keys
    sources = {tied[name] for name in stored if name in tied} | set(stored)
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    return sorted(
        name
        for name in model.state_dict()
        if name not in sources and tied.get(name) not in sources and not any(each.search(name) for each in ignored)
    )


@torch.no_grad()
def fill(model: nn.Module, stored: dict[str, Stored]) -> None:
    """Read this rank's part of each parameter and buffer of a model that is already cut; its shape is known to fit."""
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    by_file = sorted(stored, key=lambda name: stored[name].file)
    for file, names in groupby(tracked(by_file, "reading weights", "tensors"), key=lambda name: stored[name].file):
        with safe_open(file, framework="pt") as tensors:
            for name in names:
                tensor = own[base_name(model, name)]
                shard = local(tensor)
                if shard.numel():
                    shard.copy_(stored[name].read(tensors, own_region(tensor)))


@torch.no_grad()
def put(model: nn.Module, values: Iterator[tuple[str, Tensor]]) -> None:
    """This rank's part of whole parameters, by name."""
    own = dict(model.named_parameters())
    for name, whole in values:
        local(own[name]).copy_(whole[own_region(own[name])])


def own_region(tensor: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank has: one slice a dimension.

    FSDP2 cuts what tensor parallelism has left of the first dimension, so the mesh's last axis cuts first.
    """
    region = [(0, size) for size in tensor.shape]
    if isinstance(tensor, DTensor):
        mesh, coordinate = tensor.device_mesh, tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for axis in reversed(range(mesh.ndim)):
            dim = getattr(tensor.placements[axis], "dim", None)
            if dim is not None:
                begin, end = region[dim]
                first, last = part_of(end - begin, mesh.size(axis), coordinate[axis])
                region[dim] = begin + first, begin + last
    return tuple(slice(begin, end) for begin, end in region)


def compute_buffers(model: PreTrainedModel) -> None:
    """Compute the buffers that no checkpoint has, such as rotary frequencies, as transformers does after it has loaded.

    Raises ModelError for a model that does not say how.
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


def _take_generation_config(model: PreTrainedModel, reference: str) -> None:
    """So that what is exported generates as what was loaded."""
    with suppress(OSError):
        model.generation_config = GenerationConfig.from_pretrained(resolve(reference))
