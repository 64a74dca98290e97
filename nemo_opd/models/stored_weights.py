"""A model's weight files: tensors as pieces of parameters by transformers' rules, input embeddings, a fingerprint."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)
from transformers.utils import (
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    WEIGHTS_INDEX_NAME,
    WEIGHTS_NAME,
    cached_file,
)
from transformers.utils.hub import get_checkpoint_shard_files

from nemo_opd.errors import ModelError
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.folder import files_in, first_line, reason, safetensors_files, shards_in
from nemo_opd.models.load import build_on_meta, check_nothing_missing, load_config, text_name, unreadable
from nemo_opd.progress import tracked

_COMPARED_ROWS = 1024
_FLOATS = {"F64", "F32", "F16", "BF16"}
"""safetensors' names of the types of unquantised weights."""
_SAFETENSORS = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
_UNCONVERTED = ""
"""Key, in place of a converter's pattern, of tensors without a converter."""


class NotPiecewiseError(Exception):
    """Signal that weights cannot be read piece by piece."""


@dataclass(frozen=True, slots=True)
class Stored:
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Block of a parameter from one stored tensor: the full parameter unless transformers stacks or joins tensors."""

    stored: Stored
    begins: tuple[int, ...]
    """Index in the parameter of the block's first value."""
    stacked: int | None = None
    """Dimension of the parameter along which stored tensors are stacked, if they are."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the block, with as many dimensions as the parameter."""
        shape = list(self.stored.shape)
        if self.stacked is not None:
            shape.insert(self.stacked, 1)
        return tuple(shape)

    def overlap(self, region: tuple[slice, ...]) -> tuple[tuple[slice | int, ...], tuple[slice, ...]] | None:
        """Return the overlap with the parameter's `region`, as indices into the region and into the stored tensor.

        Returns None if they do not overlap.
        """
        target: list[slice | int] = []
        source = []
        for dim, (begin, size, part) in enumerate(zip(self.begins, self.shape, region, strict=True)):
            first, last = max(begin, part.start), min(begin + size, part.stop)
            if first >= last:
                return None
            if dim == self.stacked:
                target.append(first - part.start)
            else:
                target.append(slice(first - part.start, last - part.start))
                source.append(slice(first - begin, last - begin))
        return tuple(target), tuple(source)


def check_weights(model: PreTrainedModel, reference: str, *, key: str) -> None:
    """Compare a model on meta with the headers of its files, if `reference` is a folder.

    Raises ModelError, naming `key`, for tensors that are missing or have another shape or kind than the model's.
    """
    if Path(resolve(reference)).is_dir():
        with suppress(NotPiecewiseError):
            require_piecewise(model, model.dtype)
            find_pieces(model, reference, key=key)


def require_piecewise(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Raise NotPiecewiseError for a model on meta that transformers' loading in `dtype` would change.

    Buffers that transformers keeps in float32 are converted here; parameters that it keeps in float32 are not
    supported, as the model would have parameters of two dtypes.
    """
    if getattr(model.config, "quantization_config", None) is not None:
        raise NotPiecewiseError
    is_kept = kept_in_fp32(model, dtype)
    if any(is_kept(name) for name, _ in model.named_parameters()):
        raise NotPiecewiseError
    for name, buffer in model.named_buffers():
        if is_kept(name):
            owner, _, attribute = name.rpartition(".")
            model.get_submodule(owner)._buffers[attribute] = buffer.float()
    buffers = {id(buffer) for buffer in model.buffers()}
    for module in model.modules():
        # Tensors other than parameters and buffers would stay on meta.
        if any(isinstance(value, Tensor) and id(value) not in buffers for value in vars(module).values()):
            raise NotPiecewiseError


def kept_in_fp32(model: Any, dtype: torch.dtype) -> Callable[[str], bool]:
    """Return a predicate on tensor names that is true if transformers keeps the tensor in float32 in a `dtype` model.

    transformers lists parts of names; one of its two lists applies to float16 only.
    """
    parts: set[str] = set()
    if dtype in (torch.float16, torch.bfloat16):
        parts |= set(getattr(model, "_keep_in_fp32_modules_strict", None) or ())
    if dtype == torch.float16:
        parts |= set(getattr(model, "_keep_in_fp32_modules", None) or ())
    expressions = [re.compile(re.escape(part).replace(r"\*", ".*")) for part in parts]
    return lambda name: any(expression.search(name) for expression in expressions)


def find_pieces(model: PreTrainedModel, reference: str, *, key: str) -> dict[str, list[Piece]]:
    """Find the stored pieces of all parameters and persistent buffers of a model on meta, keyed by name.

    Raises ModelError naming `key`, and NotPiecewiseError without safetensors or if transformers does more than rename,
    stack and join tensors.
    """
    try:
        pieces = _pieces(model, weight_files(reference))
    except NotPiecewiseError:
        raise
    except Exception as error:  # safetensors, the hub and transformers each raise their own
        raise unreadable(reference, error, key=key) from error
    check_nothing_missing(reference, _missing(model, pieces), key=key)
    return pieces


def require_equal_ties(model: PreTrainedModel, pieces: dict[str, list[Piece]]) -> None:
    """Raise NotPiecewiseError if tied weights differ in the files: transformers would then leave them untied."""
    for target, source in model.all_tied_weights_keys.items():
        if target in pieces and source in pieces and not _are_equal(pieces[target][0].stored, pieces[source][0].stored):
            raise NotPiecewiseError


def _pieces(model: PreTrainedModel, files: list[Path]) -> dict[str, list[Piece]]:
    """Return the pieces of each parameter; tensors that the model does not have are ignored.

    Raises NotPiecewiseError, and ValueError for a tensor of another shape or kind.
    """
    mapping = get_model_conversion_mapping(model)
    expected = model.state_dict()
    sources: dict[str, dict[str, list[Stored]]] = defaultdict(lambda: defaultdict(list))
    for stored in _read_headers(files):
        target, pattern = _target(text_name(stored.name), mapping, model.base_model_prefix, expected)
        if target in expected:
            sources[target][pattern or _UNCONVERTED].append(stored)
    # Renamed weights get their old names in exports. Older versions of transformers do not have `was_used`.
    used: Any = [entry for entry in mapping if not hasattr(entry, "was_used") or entry.was_used()]
    model._weight_conversions = used
    converters = {
        pattern: entry for entry in mapping if isinstance(entry, WeightConverter) for pattern in entry.source_patterns
    }
    pieces = {}
    for name, parts in sources.items():
        if unconverted := parts.get(_UNCONVERTED):
            pieces[name] = [Piece(unconverted[-1], (0,) * len(unconverted[-1].shape))]
        else:
            pieces[name] = list(_joined(converters[next(iter(parts))], parts, expected[name].dim()))
        _check(pieces[name], expected[name])
    return pieces


def _read_headers(files: list[Path]) -> Iterator[Stored]:
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (not a dict)
                header = tensors.get_slice(name)
                yield Stored(file, name, torch.Size(header.get_shape()), header.get_dtype())


def _target(name: str, mapping: list[Any], prefix: str, expected: dict[str, Tensor]) -> tuple[str, str | None]:
    """Return a stored tensor's name in the model, and the pattern of its converter, if it has one."""
    renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
    target, pattern = rename_source_key(name, renamings, converters, prefix, expected)
    if target not in expected and name in expected:
        target, pattern = rename_source_key(name, [], [], prefix, expected)
    return str(target), pattern


def _joined(converter: Any, parts: dict[str, list[Stored]], num_dims: int) -> Iterator[Piece]:
    """Yield the pieces of a parameter that transformers combines from several tensors. Raises NotPiecewiseError."""
    stacked, joined = _dims(converter.operations)
    if len(converter.target_patterns) > 1:
        raise NotPiecewiseError
    begin = 0
    for pattern in converter.source_patterns:
        piece = None
        in_order = sorted(parts.get(pattern, ()), key=lambda stored: dot_natural_key(stored.name))
        for index, stored in enumerate(in_order):
            begins = [0] * num_dims
            if joined is not None:
                begins[joined] = begin
            if stacked is not None:
                begins[stacked] = index
            piece = Piece(stored, tuple(begins), stacked)
            yield piece
        if piece is not None and joined is not None:
            begin += piece.shape[joined]


def _dims(operations: list[Any]) -> tuple[int | None, int | None]:
    """Return the dimensions along which tensors are stacked and then joined, each None if they are not.

    Raises NotPiecewiseError for other operations.
    """
    match operations:
        case [MergeModulelist(dim=stacked)]:
            return stacked, None
        case [MergeModulelist(dim=stacked), Concatenate(dim=joined)]:
            return stacked, joined
        case [Concatenate(dim=joined)] if getattr(operations[0], "num_shards_attribute", None) is None:
            return None, joined
    raise NotPiecewiseError


def _check(pieces: list[Piece], expected: Tensor) -> None:
    """Raise ValueError for a piece that exceeds the parameter, is too small, or has quantised values."""
    for piece in pieces:
        ends = [begin + size for begin, size in zip(piece.begins, piece.shape, strict=False)]
        is_inside = len(piece.shape) == expected.dim() and all(map(int.__le__, ends, expected.shape))
        stored = piece.stored
        if not is_inside or (len(pieces) == 1 and piece.shape != expected.shape and piece.stacked is None):
            raise ValueError(f"{stored.name} is {list(stored.shape)}, the model has {list(expected.shape)}")
        if expected.is_floating_point() and stored.dtype not in _FLOATS:
            raise ValueError(
                f"{stored.name} is of type {stored.dtype}, and config.json has no quantization_config for it"
            )


def _are_equal(a: Stored, b: Stored) -> bool:
    rows = a.shape[0]
    parts = ((slice(start, min(start + _COMPARED_ROWS, rows)),) for start in range(0, rows, _COMPARED_ROWS))
    with safe_open(a.file, framework="pt") as a_tensors, safe_open(b.file, framework="pt") as b_tensors:
        return all(torch.equal(a.read(a_tensors, part), b.read(b_tensors, part)) for part in parts)


def _missing(model: PreTrainedModel, pieces: dict[str, list[Piece]]) -> list[str]:
    """Return the names that are not completely stored, except tied names and names that the model does not need."""
    tied: dict[str, str] = model.all_tied_weights_keys
    state = model.state_dict()
    complete = {
        name for name, parts in pieces.items() if sum(prod(piece.shape) for piece in parts) == state[name].numel()
    }
    sources = {tied[name] for name in complete if name in tied} | complete
    ignored = [re.compile(pattern) for pattern in model._keys_to_ignore_on_load_missing or ()]
    return sorted(
        name
        for name in state
        if name not in sources
        and tied.get(name) not in sources
        and not any(expression.search(name) for expression in ignored)
    )


def input_embeddings(reference: str, *, key: str) -> Tensor:
    """Read the embeddings [vocabulary, hidden width] from a folder's safetensors. Raises ModelError naming `key`."""
    config = load_config(reference, key=key)
    folder = Path(resolve(reference))
    if not folder.is_dir():
        raise ModelError(f"{key}={reference}: there is no such folder; download the model and name its folder")
    files = safetensors_files(folder)
    if not files:
        raise ModelError(f"{key}={reference}: the folder has no safetensors files; save the weights in that format")
    model = build_on_meta(config, reference, key=key)
    embeddings = model.get_input_embeddings()
    name = next(f"{name}.weight" for name, module in model.named_modules() if module is embeddings)
    tail = ".".join(name.split(".")[-2:])  # base models and larger models have other prefixes
    try:
        candidates = [stored for stored in _read_headers(files) if f".{stored.name}".endswith(f".{tail}")]
        if not candidates:
            raise ModelError(
                f"{key}={reference}: none of {', '.join(file.name for file in files)} holds the input embeddings "
                f"{name} or a tensor whose name ends with {tail}; name a folder with all weights"
            )
        stored = min(candidates, key=lambda stored: (stored.name != name, len(stored.name)))
        with safe_open(stored.file, framework="pt") as weights:
            return stored.read(weights, ())
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{key}={reference}: the weights are damaged ({first_line(error)}); copy them again"
        ) from error


def weights_fingerprint(reference: str, *, key: str) -> str:
    """Return a hash of a model's weights and configuration. Downloads a hub model and reads all of its weight files.

    Raises ModelError naming `key`.
    """
    try:
        source = resolve(reference)
        config = Path(str(cached_file(source, "config.json")))
        weights = _files(source, *_SAFETENSORS) or _files(source, WEIGHTS_NAME, WEIGHTS_INDEX_NAME)
        if not weights:
            raise FileNotFoundError(f"no {SAFE_WEIGHTS_NAME} and no {WEIGHTS_NAME}")
        digest = hashlib.sha256()
        for path in tracked([config, *weights], "hashing the weights", "files"):
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    except (OSError, ValueError) as error:
        raise ModelError(
            f"{key}={reference}: its weights cannot be read ({reason(error)}); check the folder, or whether the hub "
            "can be reached"
        ) from error
    return digest.hexdigest()


def weight_files(reference: str) -> list[Path]:
    """Return the safetensors files of a model's weights. Raises NotPiecewiseError if the model has none."""
    if not (files := _files(resolve(reference), *_SAFETENSORS)):
        raise NotPiecewiseError
    return files


def _files(source: str, single: str, index: str) -> list[Path]:
    """Return the weight files of a folder or hub name in one format, downloaded if needed.

    Returns an empty list if the model has none in this format.
    """
    if Path(source).is_dir():
        return files_in(Path(source), single, index)
    options: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False}
    if (single_path := cached_file(source, single, **options)) is not None:
        return [Path(single_path)]
    if (index_path := cached_file(source, index, **options)) is None:
        return []
    shards_in(Path(index_path))  # rejects names of files elsewhere
    files, _ = get_checkpoint_shard_files(source, index_path)
    return [Path(file) for file in files]
