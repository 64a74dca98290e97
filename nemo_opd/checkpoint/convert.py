"""Conversion of checkpoints to Hugging Face folders, and of these to starts of runs; in one process."""

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
from transformers import PreTrainedModel

from nemo_opd.checkpoint.manager import PROGRESS, TEMPORARY, Progress, read_whole
from nemo_opd.checkpoint.metadata import MetadataError, read_metadata
from nemo_opd.checkpoint.state import read_sharded, sharded_state, write_rank_file, write_sharded
from nemo_opd.checkpoint.verify import STATE
from nemo_opd.config.lora import Lora
from nemo_opd.config.model import Student
from nemo_opd.disk import storage_errors
from nemo_opd.distributed.finite import find_not_finite_here
from nemo_opd.errors import CheckpointError
from nemo_opd.files import settle, sync
from nemo_opd.models.export import stored
from nemo_opd.models.folder import demo_folder, first_line
from nemo_opd.models.load import build_on_meta, load_config, load_model, stored_dtype, tokenizer_of
from nemo_opd.models.lora import NAME, PEFT_PREFIX, Adapters, adapter_parameters, keep_adapters_only

_WEIGHTS: tuple[str, ...] = ("model",)
"""Keys of the weights in a sharded state."""
_ADAPTER_CONFIG = "adapter_config.json"
_ADAPTER_WEIGHTS = "adapter_model.safetensors"
_NOT_COMPUTED_WITH = {
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
"""Keys of a model's configuration on which its logits do not depend."""

_Shapes = Mapping[str, torch.Size]
"""Shapes by names in the model."""


def trained_part(student: Student) -> PreTrainedModel:
    """Return the student on meta, with a state that has what checkpoints have: adapters alone where it learns these.

    Raises ModelError where the configuration of `student.model` cannot be read, or cannot have these adapters.
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
    """Return None where all weights are trained; the seed is of no interest, as no values are drawn."""
    return None if student.lora is None else Adapters(student.lora, student.model, seed=0)


def to_hugging_face(
    checkpoint: Path, student: Student, output: Path, dtype: torch.dtype | None = None, average: str | None = None
) -> torch.dtype:
    """Write what a checkpoint of this student has learned as a Hugging Face folder, and return the dtype written.

    The folder is what the run itself exports: a whole model with its tokenizer or, where `student.lora.export` is
    adapter, a folder for `peft`. dtype: of a whole model, by default that of `student.model`; adapters are fp32.
    average: name in the state of an average, which is written in place of the weights.
    `output` is whole or absent. Holds the model once, in `dtype`, and one tensor of the state. Raises CheckpointError
    for a state that is incomplete, damaged, not finite or of another student and an output that is in use, and
    ModelError where `student.model` cannot be read.
    """
    state, model = checkpoint / STATE, trained_part(student)
    keys = _WEIGHTS if average is None else ("averages", average)
    expected = _shapes_of(model) if average is None else _trained_shapes(model)
    _require_fit(shapes_in(state, keys), expected, what=str(checkpoint), student=student)
    tokenizer = tokenizer_of(student, key="student")
    adapters = _adapters(student)
    dtype = dtype or stored_dtype(student.model, key="student.model")
    with new_folder(output) as folder:
        if adapters is None:
            whole = load_model(student.model, dtype, key="student.model")
            _read_weights(state, keys, {name: value for name, value in whole.state_dict().items() if name in expected})
            _require_finite(checkpoint, whole.state_dict(), dtype)
        else:
            learned = {name: torch.empty(parameter.shape) for name, parameter in adapter_parameters(model)}
            _read_weights(state, keys, learned)
            _require_finite(checkpoint, learned, torch.float32)
            if adapters.settings.export == "adapter":
                adapters.save(learned, model, folder)
                tokenizer.save_pretrained(folder)
                return torch.float32
            whole = load_model(student.model, dtype, key="student.model")
            adapters.merge(learned, whole)
        # A run exports all weights in this dtype, also those that transformers keeps in fp32.
        whole.save_pretrained(
            folder, state_dict={name: stored(value, dtype) for name, value in whole.state_dict().items()}
        )
        tokenizer.save_pretrained(folder)
    return dtype


def _require_finite(checkpoint: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raise CheckpointError where a value is NaN or infinite in `dtype`."""
    if (found := find_not_finite_here(weights, dtype=dtype)) is not None:
        raise CheckpointError(
            f"--checkpoint={checkpoint}: {found} in {str(dtype).removeprefix('torch.')}; use another checkpoint, or a "
            "wider --dtype"
        )


def shapes_in(state: Path, keys: Sequence[str] = _WEIGHTS) -> dict[str, torch.Size]:
    """Return the shapes of the weights, or of an average, below these keys of a sharded state.

    Raises CheckpointError where it is absent or damaged.
    """
    below = ".".join((*keys, ""))
    try:
        entries = read_metadata(state).state_dict_metadata
    except (OSError, MetadataError) as error:
        raise _unreadable(state, error) from error
    return {
        name.removeprefix(below): entry.size
        for name, entry in entries.items()
        if name.startswith(below) and isinstance(entry, TensorStorageMetadata)
    }


def _shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


def _trained_shapes(model: PreTrainedModel) -> dict[str, torch.Size]:
    """Return the shapes of the parameters, tied ones once, as averages have them."""
    trained = {name: each.shape for name, each in model.named_parameters() if each.requires_grad}
    return {name: shape for name, shape in trained.items() if name not in model.all_tied_weights_keys}


def _read_weights(state: Path, keys: Sequence[str], into: Mapping[str, Tensor]) -> None:
    """Copy whole tensors out of a sharded state, each to its own dtype. Raises CheckpointError where it is damaged."""
    nested: dict[str, Any] = dict(into)
    for key in reversed(keys):
        nested = {key: nested}
    try:
        read_sharded(nested, state, no_dist=True)
    except Exception as error:
        raise _unreadable(state, error) from error


def _unreadable(state: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{state} cannot be read ({first_line(error)}): it is incomplete, damaged, or no state of a run; use another "
        "checkpoint"
    )


def _require_fit(found: _Shapes, expected: _Shapes, *, what: str, student: Student) -> None:
    """Raise CheckpointError with the first weight of `what` that is not as the student's settings have it."""

    def shown(shape: torch.Size | None) -> str:
        return "absent" if shape is None else str(list(shape))

    learns = "student.lora=null" if student.lora is None else f"student.lora.rank={student.lora.rank}"
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{what} does not fit the run's settings: {name} is {shown(found.get(name))} there, and "
                f"{shown(expected.get(name))} with student.model={student.model} and {learns}; give the settings that "
                "belong to these weights"
            )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Yield a temporary folder, which becomes `target` at the end; an error inside leaves no trace.

    Raises CheckpointError where `target` is in use or cannot be written.
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
    """Raise CheckpointError where `target` exists and is no empty folder."""
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise CheckpointError(
            f"--output={target}: it exists and is not empty; nothing is overwritten, so name another folder or remove "
            "it first"
        )


def read_whole_checkpoint(checkpoint: Path) -> Progress:
    """Return the driver's part of a checkpoint, after comparing all files with the manifest.

    Raises CheckpointError for what is no whole checkpoint, with what it is where that can be seen.
    """
    value = f"--checkpoint={checkpoint}"
    if not checkpoint.is_dir():
        raise CheckpointError(f"{value}: there is no such folder; name one such as RUN/checkpoints/step_000100")
    if checkpoint.name.startswith(TEMPORARY):
        raise CheckpointError(f"{value}: it was not written to its end; use the checkpoint before it")
    for part in (PROGRESS, STATE):
        if not (checkpoint / part).exists():
            raise CheckpointError(f"{value}: it has no {part}; {_what_else(checkpoint)}")
    try:
        return read_whole(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"--checkpoint: {error}; use another checkpoint") from error


def _what_else(folder: Path) -> str:
    """Return what a folder that is no whole checkpoint may be, and what to do about it."""
    inside = sorted(each.parent for pattern in ("", "*/") for each in folder.glob(f"{pattern}step_*/{PROGRESS}"))
    if inside:
        return f"it is a folder of checkpoints; name one of them, such as {inside[-1]}"
    if (folder / "config.json").is_file() or (folder / _ADAPTER_CONFIG).is_file():
        return "it is a Hugging Face folder already"
    return "it is incomplete, or no checkpoint; name a folder such as RUN/checkpoints/step_000100, as the run wrote it"


def require_same_adapters(saved: Mapping[str, object], current: Mapping[str, object], checkpoint: Path) -> None:
    """Raise CheckpointError where the adapters were trained with other settings; both are from `identity`."""
    for key in sorted(saved.keys() | current.keys()):
        if key.startswith("student.lora") and saved.get(key) != current.get(key):
            raise CheckpointError(
                f"--checkpoint={checkpoint} was written with {key}={saved.get(key)!r}, and the settings have "
                f"{current.get(key)!r}; give the run's own config.yaml as --config"
            )


def weights_to_start_from(reference: str, student: Student, model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the weights of a Hugging Face folder as a checkpoint of this student has them: whole, fp32, by name.

    model: from `trained_part`. reference: a folder for `peft` where adapters are trained, else a model. Holds these
    weights once. Raises CheckpointError where they do not fit the student, ModelError where they are unreadable.
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
                f"{what}: {name} and {source} differ, and are one weight in student.model, of which only one could be "
                "kept; use it as student.model itself"
            )
    return weights


def other_settings(reference: str, student: Student) -> dict[str, tuple[object, object]]:
    """Return the values of a model's configuration and of `student.model`'s for keys that change what they compute."""
    there, here = (
        load_config(each, key=key).to_dict() for each, key in ((reference, "--model"), (student.model, "student.model"))
    )
    return {
        key: (there.get(key), here.get(key))
        for key in sorted((there.keys() | here.keys()) - _NOT_COMPUTED_WITH)
        if there.get(key) != here.get(key)
    }


def _adapter_weights(folder: Path, lora: Lora, model: nn.Module) -> dict[str, Tensor]:
    """Read a folder for `peft`; names that the model does not have stay as they are in the folder."""
    own = {_peft_name(name): name for name, _ in adapter_parameters(model)}
    try:
        config = json.loads((folder / _ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / _ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"--model={folder}: no adapter can be read there ({first_line(error)}), and with student.lora checkpoints "
            "have adapters alone; give a folder for peft, or use a whole model as student.model"
        ) from error
    for key, expected in {"lora_alpha": lora.alpha, "use_rslora": False}.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(
                f"--model={folder}: {_ADAPTER_CONFIG} has {key}={config[key]}, but the run has {expected} "
                f"(student.lora.alpha={lora.alpha}), so the same weights would count differently; make them equal"
            )
    return {own.get(name, name): value.float() for name, value in tensors.items()}


def _peft_name(name: str) -> str:
    """Return the name that an adapter's parameter has in an adapter's file."""
    owner, _, rest = name.rpartition(f".{NAME}.")
    return f"{PEFT_PREFIX}{owner}.{rest}"


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

    weights: whole, by their names in `model`, which may be on meta. averages: names of averages, which begin with these
    weights. Optimizer, schedule and random generators are those of a run without a checkpoint. Needs memory for one
    tensor of each shape in addition to the weights.
    """
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    _, optimizer_state = get_state_dict(model, optimizer)
    means = {each: {name: weights[name] for name in _trained_shapes(model)} for each in averages}
    write_sharded(
        sharded_state(dict(weights), _before_first_step(optimizer_state), means), folder / STATE, no_dist=True
    )
    write_rank_file(
        folder / STATE, 0, {"scheduler": scheduler.state_dict(), "rng": {"cpu": torch.Generator().get_state()}}
    )


def _before_first_step(optimizer_state: Any) -> dict[str, Any]:
    """Return the same entries with zeros, one tensor for all that are alike.

    torch makes the entries by a step without gradients, which its step counters have counted.
    """

    @cache
    def zeros(shape: torch.Size, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype)

    return {
        **optimizer_state,
        "state": {
            name: {key: zeros(value.shape, value.dtype) for key, value in entries.items()}
            for name, entries in optimizer_state["state"].items()
        },
    }
