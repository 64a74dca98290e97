"""Checkpoints made into Hugging Face folders, and starts of runs made of such; in one process, whatever ranks wrote."""

import json
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
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
from transformers import AutoModelForCausalLM, PreTrainedModel

from nemo_opd.checkpoint.manager import PROGRESS, TEMPORARY, Progress, read_whole
from nemo_opd.checkpoint.metadata import MetadataError, read_metadata
from nemo_opd.checkpoint.sharded import read_sharded, write_sharded
from nemo_opd.checkpoint.state import write_rank_file
from nemo_opd.config.lora import Lora
from nemo_opd.config.model import Student
from nemo_opd.disk import storage_errors
from nemo_opd.distributed.finite import find_not_finite_here
from nemo_opd.errors import CheckpointError
from nemo_opd.files import settle, sync
from nemo_opd.models.export import stored
from nemo_opd.models.folder import first_line, resolve
from nemo_opd.models.load import load_config, load_model, tokenizer_of
from nemo_opd.models.lora import NAME, PEFT_PREFIX, Adapters, adapter_parameters, keep_adapters_only

STATE = "state"
MODEL = "model."
"""Before the names of weights in a sharded state."""
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
NOT_COMPUTED_WITH = {
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

Shapes = Mapping[str, torch.Size]
"""By names in the model."""


def trained_part(student: Student) -> PreTrainedModel:
    """The student on meta, with adapters where it learns these; its state has what checkpoints have, and no more.

    Raises ModelError where the configuration of `student.model` cannot be read, or cannot have these adapters.
    """
    model = on_meta(student.model, key="student.model")
    if (adapters := adapters_of(student)) is not None:
        model.requires_grad_(False)
        adapters.attach(model)
        keep_adapters_only(model)
    return model


def on_meta(reference: str, *, key: str) -> PreTrainedModel:
    config = load_config(reference, key=key)
    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    return model


def adapters_of(student: Student) -> Adapters | None:
    """None where all weights are trained. The values that they start from are of no interest here."""
    return None if student.lora is None else Adapters(student.lora, student.model, seed=0)


def to_hugging_face(checkpoint: Path, student: Student, output: Path, dtype: torch.dtype | None = None) -> torch.dtype:
    """Write as a Hugging Face folder what a checkpoint of this student has learned: the dtype of what is written.

    That is what the run itself exports: a whole model with its tokenizer or, where `student.lora.export` is adapter,
    a folder for `peft`. dtype: of a whole model, and that of `student.model` by default; adapters are fp32. `output` is
    whole or absent. Holds the model once, in `dtype`, and one tensor of the state. Raises CheckpointError for a state
    that is incomplete, damaged, not finite or of another student and an output that is in use, and ModelError where
    `student.model` cannot be read.
    """
    state, model = checkpoint / STATE, trained_part(student)
    require_fit(shapes_in(state), shapes_of(model), what=str(checkpoint), student=student)
    tokenizer = tokenizer_of(student, key="student")
    adapters = adapters_of(student)
    dtype = dtype or dtype_of(student)
    with new_folder(output) as folder:
        if adapters is None:
            whole = load_model(student.model, dtype, key="student.model")
            read_weights(state, whole.state_dict())
            require_finite(checkpoint, whole.state_dict(), dtype)
        else:
            learned = {name: torch.empty(parameter.shape) for name, parameter in adapter_parameters(model)}
            read_weights(state, learned)
            require_finite(checkpoint, learned, torch.float32)
            if adapters.settings.export == "adapter":
                adapters.save(learned, model, folder)
                tokenizer.save_pretrained(folder)
                return torch.float32
            whole = load_model(student.model, dtype, key="student.model")
            adapters.merge(learned, whole)
        # What transformers keeps in fp32 beside other weights, a run exports like these.
        whole.save_pretrained(
            folder, state_dict={name: stored(value, dtype) for name, value in whole.state_dict().items()}
        )
        tokenizer.save_pretrained(folder)
    return dtype


def require_finite(checkpoint: Path, weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
    """Raises CheckpointError where a value is NaN or infinite in `dtype`."""
    if (found := find_not_finite_here(weights, dtype=dtype)) is not None:
        raise CheckpointError(
            f"--checkpoint={checkpoint}: {found} in {str(dtype).removeprefix('torch.')}; use another checkpoint, or a "
            "wider --dtype"
        )


def dtype_of(student: Student) -> torch.dtype:
    """That of the weights which the student starts from, as far as its configuration says."""
    dtype = load_config(student.model, key="student.model").dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def shapes_in(state: Path) -> dict[str, torch.Size]:
    """Of the weights in a sharded state. Raises CheckpointError where there is none, or it is damaged."""
    try:
        entries = read_metadata(state).state_dict_metadata
    except (OSError, MetadataError) as error:
        raise unreadable(state, error) from error
    return {
        name.removeprefix(MODEL): entry.size
        for name, entry in entries.items()
        if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
    }


def shapes_of(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


def read_weights(state: Path, into: Mapping[str, Tensor]) -> None:
    """Copy whole weights out of a sharded state, each in its own dtype. Raises CheckpointError where it is damaged."""
    try:
        with in_one_process():
            read_sharded({MODEL.removesuffix("."): dict(into)}, state, no_dist=True)
    except Exception as error:
        raise unreadable(state, error) from error


@contextmanager
def in_one_process() -> Iterator[None]:
    """Silence torch, which warns that torch.distributed is off where it was told to go without."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def unreadable(state: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{state} cannot be read ({first_line(error)}): it is incomplete, damaged, or no state of a run; use another "
        "checkpoint"
    )


def require_fit(found: Shapes, expected: Shapes, *, what: str, student: Student) -> None:
    """Raises CheckpointError with the first weight of `what` that is not as the student's settings have it."""

    def said(shape: torch.Size | None) -> str:
        return "absent" if shape is None else str(list(shape))

    learns = "student.lora=null" if student.lora is None else f"student.lora.rank={student.lora.rank}"
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise CheckpointError(
                f"{what} does not fit the run's settings: {name} is {said(found.get(name))} there, and "
                f"{said(expected.get(name))} with student.model={student.model} and {learns}; give the settings that "
                "belong to these weights"
            )


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """A temporary folder beside `target`, which it becomes at the end; an error inside leaves no trace.

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
    """Raises CheckpointError where something is there that is no empty folder."""
    if target.is_dir() and not any(target.iterdir()):
        return
    if target.exists():
        raise CheckpointError(
            f"--output={target}: it exists and is not empty; nothing is overwritten, so name another folder or remove "
            "it first"
        )


def read_whole_checkpoint(checkpoint: Path) -> Progress:
    """The driver's part, once all files are compared with the manifest.

    Raises CheckpointError for what is no whole checkpoint, with what it is where that shows.
    """
    value = f"--checkpoint={checkpoint}"
    if not checkpoint.is_dir():
        raise CheckpointError(f"{value}: there is no such folder; name one such as RUN/checkpoints/step_000100")
    if checkpoint.name.startswith(TEMPORARY):
        raise CheckpointError(f"{value}: it was not written to its end; use the checkpoint before it")
    for part in (PROGRESS, STATE):
        if not (checkpoint / part).exists():
            raise CheckpointError(f"{value}: it has no {part}; {what_else(checkpoint)}")
    try:
        return read_whole(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"--checkpoint: {error}; use another checkpoint") from error


def what_else(folder: Path) -> str:
    """What a folder may be that is no whole checkpoint, and what to do about it."""
    inside = sorted(each.parent for pattern in ("", "*/") for each in folder.glob(f"{pattern}step_*/{PROGRESS}"))
    if inside:
        return f"it is a folder of checkpoints; name one of them, such as {inside[-1]}"
    if (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file():
        return "it is a Hugging Face folder already, which nothing has to be made of"
    return "it is incomplete, or no checkpoint; name a folder such as RUN/checkpoints/step_000100, as the run wrote it"


def require_same_adapters(saved: Mapping[str, object], current: Mapping[str, object], checkpoint: Path) -> None:
    """Raises CheckpointError where adapters of these settings would count for more or less than they were trained to.

    Both are what `identity` gives.
    """
    for key in sorted(saved.keys() | current.keys()):
        if key.startswith("student.lora") and saved.get(key) != current.get(key):
            raise CheckpointError(
                f"--checkpoint={checkpoint} was written with {key}={saved.get(key)!r}, and the settings have "
                f"{current.get(key)!r}; give the run's own config.yaml as --config"
            )


def weights_to_start_from(reference: str, student: Student, model: PreTrainedModel) -> dict[str, Tensor]:
    """What a checkpoint of this student would have of a Hugging Face folder, whole and in fp32, by names in `model`.

    model: what `trained_part` gave. reference: a folder for `peft` where adapters are trained, else a model. Holds
    these weights once. Raises CheckpointError where they do not fit the student, ModelError where they are unreadable.
    """
    what, expected = f"--model={reference}", shapes_of(model)
    if student.lora is not None:
        weights = adapter_weights(Path(resolve(reference)), student.lora, model)
        require_fit({name: value.shape for name, value in weights.items()}, expected, what=what, student=student)
        return weights
    require_fit(shapes_of(on_meta(reference, key="--model")), expected, what=what, student=student)
    weights = load_model(reference, torch.float32, key="--model").state_dict()
    require_equal_ties(weights, model, what)
    return weights


def other_settings(reference: str, student: Student) -> dict[str, tuple[object, object]]:
    """Key → what a model's configuration says, and that of `student.model`, where they differ in how they compute."""
    there, here = (
        load_config(each, key=key).to_dict() for each, key in ((reference, "--model"), (student.model, "student.model"))
    )
    return {
        key: (there.get(key), here.get(key))
        for key in sorted((there.keys() | here.keys()) - NOT_COMPUTED_WITH)
        if there.get(key) != here.get(key)
    }


def require_equal_ties(weights: Mapping[str, Tensor], model: PreTrainedModel, what: str) -> None:
    for name, source in model.all_tied_weights_keys.items():
        if not torch.equal(weights[name], weights[source]):
            raise CheckpointError(
                f"{what}: {name} and {source} differ, and are one weight in student.model, of which only one could be "
                "kept; use it as student.model itself"
            )


def adapter_weights(folder: Path, lora: Lora, model: nn.Module) -> dict[str, Tensor]:
    """From a folder for `peft`; names that the model has not stay as they are there."""
    own = {peft_name(name): name for name, _ in adapter_parameters(model)}
    try:
        config = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
        tensors = load_file(folder / ADAPTER_WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise CheckpointError(
            f"--model={folder}: no adapter can be read there ({first_line(error)}), and with student.lora checkpoints "
            "have adapters alone; give a folder for peft, or use a whole model as student.model"
        ) from error
    for key, expected in {"lora_alpha": lora.alpha, "use_rslora": False}.items():
        if config.get(key, expected) != expected:
            raise CheckpointError(
                f"--model={folder}: {ADAPTER_CONFIG} has {key}={config[key]}, but the run has {expected} "
                f"(student.lora.alpha={lora.alpha}), so the same weights would count differently; make them equal"
            )
    return {own.get(name, name): value.float() for name, value in tensors.items()}


def peft_name(name: str) -> str:
    """In an adapter's file, of an adapter's parameter."""
    owner, _, rest = name.rpartition(f".{NAME}.")
    return f"{PEFT_PREFIX}{owner}.{rest}"


def save_start(
    folder: Path,
    weights: Mapping[str, Tensor],
    model: PreTrainedModel,
    build_optimizer: Callable[[nn.Module], Optimizer],
    build_scheduler: Callable[[Optimizer], LRScheduler],
) -> None:
    """Write the state of a run before its first step into the checkpoint `folder`, for any number of ranks.

    weights: whole, by their names in `model`, which may be on meta. Optimizer, schedule and random generators are as a
    run finds them that has no checkpoint. Needs memory for one tensor of each shape beside the weights.
    """
    optimizer = build_optimizer(model)
    scheduler = build_scheduler(optimizer)
    _, optimizer_state = get_state_dict(model, optimizer)
    state = {MODEL.removesuffix("."): dict(weights), "optimizer": before_first_step(optimizer_state)}
    with in_one_process():
        write_sharded(state, folder / STATE, no_dist=True)
    write_rank_file(
        folder / STATE, 0, {"scheduler": scheduler.state_dict(), "rng": {"cpu": torch.Generator().get_state()}}
    )


def before_first_step(optimizer_state: Any) -> dict[str, Any]:
    """The same entries with zeros, one tensor for all that are alike.

    torch makes the entries by a step without gradients, which the step counters have counted.
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
