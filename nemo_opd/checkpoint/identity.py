"""The settings that a checkpoint depends on: where they change, it belongs to another run.

Speed, placement, reporting, length and the way to obtain the same samples are free. What is learned, and from what, is
bound: `tests/checkpoint/test_free_settings.py` lists those, and fails for a field that is in neither list.
"""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from nemo_opd.checkpoint.manager import CheckpointManager, Found
from nemo_opd.config import environment, handoff, reward, rollout
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.context import Context
from nemo_opd.config.data import Data
from nemo_opd.config.endpoint import Endpoint
from nemo_opd.config.health import Health
from nemo_opd.config.logging import Console, Logging, Mlflow, TensorBoard, Trackio, Wandb
from nemo_opd.config.lora import Lora
from nemo_opd.config.model import Model, Student
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import Run
from nemo_opd.config.sandbox import SandboxSettings
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.config.train import Train
from nemo_opd.errors import CheckpointError

FREE: dict[type[BaseModel], str] = {
    # These sections are free as a whole: they share classes with sections that are bound.
    RunConfig: "evaluation",
    Data: "validation num_workers cache",
    Run: "name output_dir resume dry_run push_to_hub callbacks",
    Train: (
        "max_steps epochs micro_batch_size micro_batch_tokens validate_every save_every keep_last keep_best "
        "early_stopping save_before async_save compile_losses max_skipped_steps"
    ),
    Model: "compile fused_layers attn_implementation",
    Student: "offload activation_checkpointing sync_each_micro_batch",
    TeacherBase: "offload micro_batch_tokens on_missing",
    # Where servers are and how they are reached. The program is bound, as for rollouts.
    Endpoint: "urls api_key request_timeout_s retries concurrency",
    Context: "gap_every contrast",
    Lora: "export",
    Parallelism: "tp cp sequence_parallel replicas reshard_after_forward",
    handoff.HandoffBase: "transport",
    rollout.HFRollout: "batch_size",
    # Where a server is and how it is reached. Its program is bound: each has its own numerics.
    rollout.ServerRollout: (
        "url command options environment gpus sleep memory_share start_timeout_s request_timeout_s retries concurrency "
        "weights_folder"
    ),
    reward.FunctionReward: "call_timeout_s",
    SandboxSettings: "isolation workers",
    environment.EnvironmentBase: "call_timeout_s",
    Health: "action patience max_length_growth max_truncation_rate min_entropy max_repetition max_mismatch",
    Cluster: ("device launcher num_nodes gpus_per_node cpu_ranks placement teacher_ranks prefetch address timeout_s"),
    Console: "enabled interval_s memory_table",
    TensorBoard: "enabled",
    Wandb: "enabled project entity mode",
    Mlflow: "enabled tracking_uri experiment",
    Trackio: "enabled project space",
    Logging: "gradients_every",
}


def decided_in(table: dict[type[BaseModel], str], model: type[BaseModel], name: str) -> bool:
    """Return whether the table names the field for the model or a class that it inherits from."""
    return any(name in table.get(base, "").split() for base in model.__mro__)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield dotted key, class and name of every field that needs a decision: values, and sections that are free whole.

    An element of a list has the key `*`.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        inner, is_list = _sections(field.annotation)
        if not inner or decided_in(FREE, model, name):
            yield key, model, name
            continue
        for section in inner:
            yield from fields(section, f"{key}.*." if is_list else f"{key}.")


def _sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """Return the classes that a field may hold, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    inner = [_sections(argument) for argument in get_args(annotation)]
    is_list = getattr(annotation, "__origin__", None) is tuple
    return [model for models, _ in inner for model in models], is_list or any(many for _, many in inner)


FREE_KEYS = frozenset(key for key, model, name in fields(RunConfig) if decided_in(FREE, model, name))
"""Dotted keys of free settings, with `*` for the index in a list."""


_BEFORE: dict[str, object] = {
    "data.packing": False,
    "teachers.*.weights": "frozen",
    "teachers.*.ema_decay": TeacherBase.model_fields["ema_decay"].default,
    "teachers.*.adapters": True,
}
"""Dotted keys that older versions have not stored, with what was done then."""


def identity(config: RunConfig) -> dict[str, object]:
    """Return the value of every setting that a run's results depend on, by dotted key."""
    settings = dict(flatten(config.model_dump(mode="json")))
    return _bound({**settings, "data.packing": config.packs_documents})


def _bound(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings, by dotted key, that must be the same to continue."""
    return {key: value for key, value in settings.items() if not _may_change(key)}


def _may_change(key: str) -> bool:
    """Return whether a dotted key is free or in a free section."""
    parts = _any_index(key).split(".")
    return any(".".join(parts[:depth]) in FREE_KEYS for depth in range(1, len(parts) + 1))


def _any_index(key: str) -> str:
    """Return a dotted key with `*` for indices."""
    return ".".join("*" if part.isdigit() else part for part in key.split("."))


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested settings with their dotted keys."""
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield prefix, value
        return
    for key, inner in items:
        yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))


def newest_of_same_run(checkpoints: CheckpointManager, config: RunConfig, *, hashed: bool = True) -> Found | None:
    """Return the newest whole checkpoint, from which `config` can continue; None where there are no checkpoints.

    hashed: as for `CheckpointManager.newest`. Raises CheckpointError where it is of another run, or none is whole.
    """
    found = checkpoints.newest(hashed=hashed)
    if found is not None:
        progress = found.progress
        require_same_run(progress.settings, identity(config), str(checkpoints.path(progress.step)))
    return found


def require_same_run(saved: Mapping[str, object], current: Mapping[str, object], checkpoint: str) -> None:
    """Raise CheckpointError, naming the settings that differ, where the checkpoint is of another run."""
    known = {**_BEFORE, "reward.extract.type": "boxed" if saved.get("reward.type") == "math" else "last_turn"}
    before = {key: known[pattern] for key in current if (pattern := _any_index(key)) in known}
    saved = _bound({**before, **saved})  # an older version may have stored what is free now
    differing = [key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)]
    if not differing:
        return
    shown = "; ".join(f"{key}={current.get(key)!r}, there {saved.get(key)!r}" for key in differing[:5])
    more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
    raise CheckpointError(
        f"{checkpoint} is a checkpoint of another run: {shown}{more}; restore these settings, or start anew with "
        "another run.output_dir"
    )
