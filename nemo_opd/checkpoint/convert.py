"""Conversion, in one process, of checkpoints to Hugging Face folders, and of such folders to checkpoints."""

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from nemo_opd.checkpoint.manager import PROGRESS, STATE, TEMPORARY, Progress, read_whole
from nemo_opd.checkpoint.shards import MetadataError, read_metadata, read_sharded, write_rank_file, write_sharded
from nemo_opd.checkpoint.state import sharded_state
from nemo_opd.config.model import Lora, Student
from nemo_opd.distributed.collectives import find_not_finite_here
from nemo_opd.errors import CheckpointError
from nemo_opd.files import settle, storage_errors, sync
from nemo_opd.models.export import stored
from nemo_opd.models.folder import demo_folder, first_line
from nemo_opd.models.load import build_on_meta, load_config, load_model, stored_dtype, tokenizer_of
from nemo_opd.models.lora import NAME, PEFT_PREFIX, Adapters, adapter_parameters, keep_adapters_only

_WEIGHTS: tuple[str, ...] = ("model",)
"""Keys of the weights in a sharded state."""
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_IRRELEVANT_TO_LOGITS = {
    "_name_or_path",
    "architectures",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "initializer_range",
    "pad_token_id",
    "transformers_version",
    "use_cache",
}
"""Keys of a model's configuration that do not affect its logits."""

_Shapes = Mapping[str, torch.Size]
"""Shapes, keyed by parameter name."""


def trained_part(student: Student) -> PreTrainedModel:
    """Return the student on meta, with the state that its checkpoints have: with LoRA, the adapters only.

    Raises ModelError if the configuration of `student.model` cannot be read or the model cannot have these adapters.
    """
    model = _on_meta(student.model, key="student.model")
    if (adapters := _adapters(student)) is not None:
        model.requires_grad_(False)
        adapters.attach(model)
        keep_adapters_only(model)
    return model


def _on_meta(reference: str, *, key: str) -> PreTrainedModel:
    return build_on_meta(load_config(reference, key=key), reference, key=key, dtype=torch.float32)


def _adapters(student: Student) -> Adapters | None:
    """Return the adapters, or None if all weights are trained; the seed does not matter, as no values are drawn."""
    return None if student.lora is None else Adapters(student.lora, student.model, seed=0)


def to_hugging_face(
    checkpoint: Path, student: Student, output: Path, dtype: torch.dtype | None = None, average: str | None = None
) -> torch.dtype:
    """Write the trained weights of a checkpoint as a Hugging Face folder, and return the dtype written.

    The folder is the same as the run's own export: a full model with its tokenizer or, if `student.lora.export` is
    adapter, a folder for `peft`. dtype: for a full model, by default the dtype of `student.model`; adapters are fp32.
    average: name of an average in the state, which is written instead of the weights.
    `output` is written completely or not at all. Holds the model once, in `dtype`, and one tensor of the state. Raises
    CheckpointError if the state is incomplete, damaged, not finite or from another student, or if `output` is in use,
    and ModelError if `student.model` cannot be read.
    """
    state, model = checkpoint / STATE, trained_part(student)
    keys = _WEIGHTS if average is None else ("averages", average)
    expected = _shapes_of(model) if average is None else _trained_shapes(model)
    _require_fit(shapes_in(state, keys), expected, what=str(checkpoint), student=student)
    tokenizer, adapters = tokenizer_of(student, key="student"), _adapters(student)
    is_merged = adapters is None or adapters.settings.export == "merged"
    dtype = (dtype or stored_dtype(student.model, key="student.model")) if is_merged else torch.float32
    with new_folder(output) as folder:
        full = load_model(student.model, dtype, key="student.model") if is_merged else None
        if full is not None and adapters is None:
            weights = {name: value for name, value in full.state_dict().items() if name in expected}
        else:
            weights = {name: torch.empty(parameter.shape) for name, parameter in adapter_parameters(model)}
        _read_weights(state, keys, weights)
        in_dtype = dtype if adapters is None else torch.float32
        if (problem := find_not_finite_here(weights, dtype=in_dtype)) is not None:
            raise CheckpointError(
                f"--checkpoint={checkpoint}: {problem} in {str(in_dtype).removeprefix('torch.')}; use another "
                "checkpoint, or a wider --dtype"
            )
        if full is None:
            assert adapters is not None
            adapters.save(weights, model, folder)
        else:
            if adapters is not None:
                adapters.merge(weights, full)
            # A run exports all weights in this dtype, even weights that transformers keeps in fp32.
            full.save_pretrained(
                folder, state_dict={name: stored(value, dtype) for name, value in full.state_dict().items()}
            )
        tokenizer.save_pretrained(folder)
    return dtype


def shapes_in(state: Path, keys: Sequence[str] = _WEIGHTS) -> dict[str, torch.Size]:
    """Return the shapes of the weights, or of an average, under these keys of a sharded state.

    Raises CheckpointError if the state is absent or damaged.
    """
    prefix = ".".join((*keys, ""))
    try:
        entries = read_metadata(state).state_dict_metadata
    except (OSError, MetadataError) as error:
        raise _unreadable(state, error) from error
    return {
        name.removeprefix(prefix): entry.size
        for name, entry in entries.items()
        if name.startswith(prefix) and isinstance(entry, TensorStorageMetadata)
    }


def _shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


def _trained_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of the trained parameters, as averages store them: tied parameters once."""
    return {
        name: parameter.shape
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in model.all_tied_weights_keys
    }


def _read_weights(state: Path, keys: Sequence[str], into: Mapping[str, Tensor]) -> None:
    """Copy full tensors out of a sharded state into tensors of any dtype. Raises CheckpointError if it is damaged."""
    nested: dict[str, Any] = dict(into)
    for key in reversed(keys):
        nested = {key: nested}
    try:
        read_sharded(nested, state, no_dist=True)
    except Exception as error:
        raise _unreadable(state, error) from error


def _unreadable(state: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{state} cannot be read ({first_line(error)}): it is incomplete, damaged, or not a run's state; use another "
        "checkpoint"
    )


def _require_fit(shapes: _Shapes, expected: _Shapes, *, what: str, student: Student) -> None:
    """Raise CheckpointError for the first weight of `what` that does not match the student's settings."""

    def describe(shape: torch.Size | None) -> str:
        return "absent" if shape is None else str(list(shape))

    lora = "student.lora=null" if student.lora is None else f"student.lora.rank={student.lora.rank}"
    for name in sorted(shapes.keys() | expected.keys()):
        if shapes.get(name) != expected.get(name):
            raise CheckpointError(
                f"{what} does not fit the run's settings: {name} is {describe(shapes.get(name))} there, but "
                f"{describe(expected.get(name))} with student.model={student.model} and {lora}; give the settings that "
                "belong to these weights"
            )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` at the end; on an error it is removed.

    Raises CheckpointError if `target` is in use or cannot be written.
    """
    require_unused(target)
    temporary = target.with_name(f"{TEMPORARY}{target.name}")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        with storage_errors(target, CheckpointError, instead="name another folder as --output"):
            temporary.mkdir(parents=True)
            yield temporary
            settle(temporary)
            temporary.rename(target)
            sync(target.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def require_unused(target: Path) -> None:
    """Raise CheckpointError if `target` exists and is not an empty folder."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"--output={target}: it exists and is not empty; nothing is overwritten, so name another folder or remove "
            "it first"
        )


def read_whole_checkpoint(checkpoint: Path) -> Progress:
    """Return the driver's part of a checkpoint, after comparing all files with the manifest.

    Raises CheckpointError if the folder is not a complete checkpoint, naming the kind of folder if it is recognized.
    """
    argument = f"--checkpoint={checkpoint}"
    if not checkpoint.is_dir():
        raise CheckpointError(f"{argument}: there is no such folder; name one such as RUN/checkpoints/step_000100")
    if checkpoint.name.startswith(TEMPORARY):
        raise CheckpointError(f"{argument}: it was not completely written; use the previous checkpoint")
    for part in (PROGRESS, STATE):
        if not (checkpoint / part).exists():
            raise CheckpointError(f"{argument}: it has no {part}; {_recognize(checkpoint)}")
    try:
        return read_whole(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"--checkpoint: {error}; use another checkpoint") from error


def _recognize(folder: Path) -> str:
    """Say what a folder that is not a complete checkpoint seems to be, with the remedy."""
    checkpoints = sorted(file.parent for pattern in ("", "*/") for file in folder.glob(f"{pattern}step_*/{PROGRESS}"))
    if checkpoints:
        return f"it is a folder of checkpoints; name one of them, such as {checkpoints[-1]}"
    if (folder / "config.json").is_file() or (folder / _ADAPTER_CONFIG).is_file():
        return "it is a Hugging Face folder already"
    return "it is incomplete or not a checkpoint; name a folder that a run wrote, such as RUN/checkpoints/step_000100"


def weights_to_start_from(reference: str, student: Student, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder for a checkpoint of this student: full fp32 tensors, keyed by name.

    model: from `trained_part`. reference: a folder for `peft` if adapters are trained, else a model. Holds these
    weights once. Raises CheckpointError if they do not fit the student, and ModelError if they cannot be read.
    """
    what, expected = f"--model={reference}", _shapes_of(model)
    if student.lora is not None:
        weights = _adapter_weights(Path(demo_folder(reference)), student.lora, model)
        _require_fit({name: value.shape for name, value in weights.items()}, expected, what=what, student=student)
        return weights
    _require_fit(_shapes_of(_on_meta(reference, key="--model")), expected, what=what, student=student)
    weights = load_model(reference, torch.float32, key="--model").state_dict()
    for name, source in model.all_tied_weights_keys.items():
        if not torch.equal(weights[name], weights[source]):
            raise CheckpointError(
                f"{what}: {name} and {source} differ, but they are one tied weight in student.model; use the folder as "
                "student.model itself"
            )
    return weights


def other_settings(reference: str, student: Student) -> dict[str, tuple[object, object]]:
    """Return differing configuration values (of the model, of `student.model`), for keys that affect the logits."""
    theirs = load_config(reference, key="--model").to_dict()
    ours = load_config(student.model, key="student.model").to_dict()
    return {
        key: (theirs.get(key), ours.get(key))
        for key in sorted((theirs.keys() | ours.keys()) - _IRRELEVANT_TO_LOGITS)
        if theirs.get(key) != ours.get(key)
    }


def _adapter_weights(folder: Path, lora: Lora, model: nn.Module) -> dict[str, Tensor]:
    """Read a folder for `peft`, and rename its weights as in the model; other names stay as in the folder."""
    names = {_peft_name(name): name for name, _ in adapter_parameters(model)}
    try:
        config = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / _ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"--model={folder}: no adapter can be read there ({first_line(error)}), and with student.lora checkpoints "
            "have adapters only; give a folder for peft, or use a full model as student.model"
        ) from error
    for key, expected in {"lora_alpha": lora.alpha, "use_rslora": False}.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(
                f"--model={folder}: {_ADAPTER_CONFIG} has {key}={config[key]}, but the run has {expected} "
                f"(student.lora.alpha={lora.alpha}), so the same weights would count differently; make them equal"
            )
    return {names.get(name, name): value.float() for name, value in tensors.items()}


def _peft_name(name: str) -> str:
    """Return the name of an adapter's parameter in peft's files."""
    module, _, parameter = name.rpartition(f".{NAME}.")
    return f"{PEFT_PREFIX}{module}.{parameter}"


def save_start(
    folder: Path,
    weights: Mapping[str, Tensor],
    model: PreTrainedModel,
    build_optimizer: Callable[[PreTrainedModel], Optimizer],
    build_scheduler: Callable[[Optimizer], LRScheduler],
    *,
    averages: Sequence[str],
) -> None:
    """Write the state of a run before its first step into the checkpoint `folder`, for any number of ranks.

    weights: full tensors, keyed by their names in `model`, which may be on meta. averages: names of averages, which
    start from these weights. Optimizer, schedule and random generators start as in a run without a checkpoint. Needs
    memory for one tensor of each shape in addition to the weights.
    """
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    _, entries = get_state_dict(model, optimizer)
    # torch makes the entries by a step without gradients, which has increased their step counters.
    zeros = cache(torch.zeros)  # one tensor of each shape and dtype
    moments = tree_map_only(Tensor, lambda value: zeros(value.shape, dtype=value.dtype), entries["state"])
    means = {average: {name: weights[name] for name in _trained_shapes(model)} for average in averages}
    write_sharded(sharded_state(dict(weights), {**entries, "state": moments}, means), folder / STATE, no_dist=True)
    write_rank_file(
        folder / STATE, 0, {"scheduler": scheduler.state_dict(), "rng": {"cpu": torch.Generator().get_state()}}
    )
