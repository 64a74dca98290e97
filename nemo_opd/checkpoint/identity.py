"""The settings that identify a run: a checkpoint written with other values belongs to another run.

Settings for speed, placement, reporting, length and the way to obtain the same samples are free. Settings that affect
the result are bound; `tests/checkpoint/test_free_settings.py` lists them, and fails for a field in neither list.
"""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from nemo_opd.checkpoint.manager import CheckpointManager, NewestCheckpoint
from nemo_opd.config import cluster, reward, rollout
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.context import Context
from nemo_opd.config.data import Data
from nemo_opd.config.model import Lora, Model, Parallelism, Student
from nemo_opd.config.reward import SandboxSettings
from nemo_opd.config.rollout import Health
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import Console, Logging, Mlflow, RolloutFiles, Run, TensorBoard, Trackio, Wandb
from nemo_opd.config.teacher import Endpoint, TeacherBase
from nemo_opd.config.train import Train
from nemo_opd.errors import CheckpointError

FREE: dict[type[BaseModel], str] = {
    # These sections are free in full, although they share classes with bound sections.
    RunConfig: "evaluation",
    Data: "validation domain_key num_workers cache",
    Run: "name output_dir resume dry_run push_to_hub callbacks",
    Train: (
        "max_steps epochs micro_batch_size micro_batch_tokens validate_every save_every keep_last keep_best "
        "early_stopping save_before async_save compile_losses max_skipped_steps"
    ),
    Model: "compile fused_layers attn_implementation",
    Student: "offload activation_checkpointing sync_each_micro_batch",
    TeacherBase: "offload micro_batch_tokens on_missing",
    # Addresses of servers and the way to reach them are free; the program is bound, as for rollouts.
    Endpoint: "urls api_key request_timeout_s retries concurrency",
    Context: "gap_every contrast",
    Lora: "export",
    Parallelism: "tp cp sequence_parallel replicas reshard_after_forward",
    cluster.HandoffBase: "transport",
    rollout.HFRollout: "batch_size",
    # The address of a server and the way to reach it are free; the program is bound, as each has its own numerics.
    rollout.ServerRollout: (
        "url command options environment gpus sleep memory_share start_timeout_s request_timeout_s retries concurrency "
        "weights_folder"
    ),
    reward.FunctionReward: "call_timeout_s",
    SandboxSettings: "isolation workers",
    rollout.EnvironmentBase: "call_timeout_s",
    Health: "action patience max_length_growth max_truncation_rate min_entropy max_repetition max_mismatch",
    Cluster: ("device launcher num_nodes gpus_per_node cpu_ranks placement teacher_ranks prefetch address timeout_s"),
    Console: "enabled interval_s memory_table",
    TensorBoard: "enabled",
    Wandb: "enabled project entity mode",
    Mlflow: "enabled tracking_uri experiment",
    Trackio: "enabled project space",
    RolloutFiles: "every file_mb keep_files",
    Logging: "token_groups gradients_every",
}


def decided_in(table: dict[type[BaseModel], str], model: type[BaseModel], name: str) -> bool:
    """Return whether the table lists the field for the model or one of its base classes."""
    return any(name in table.get(base, "").split() for base in model.__mro__)


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, type[BaseModel], str]]:
    """Yield (dotted key, class, name) of every field to decide on: values, and sections that are free in full.

    The key of a list's element is `*`.
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
"""Dotted keys of free settings, with `*` for list indices."""


_OLD_VALUES: dict[str, object] = {
    "data.packing": False,
    "teachers.*.weights": "frozen",
    "teachers.*.ema_decay": TeacherBase.model_fields["ema_decay"].default,
    "teachers.*.adapters": True,
}
"""Values that older versions used for settings that they did not store, keyed by dotted key."""


def identity(config: RunConfig) -> dict[str, object]:
    """Return the values of all settings that a run's results depend on, keyed by dotted key."""
    settings = dict(flatten(config.model_dump(mode="json")))
    return _bound({**settings, "data.packing": config.packs_documents})


def _bound(settings: Mapping[str, object]) -> dict[str, object]:
    """Drop the free settings."""
    return {key: value for key, value in settings.items() if not _may_change(key)}


def _may_change(key: str) -> bool:
    """Return whether a dotted key is free or in a free section."""
    parts = _with_wildcards(key).split(".")
    return any(".".join(parts[:depth]) in FREE_KEYS for depth in range(1, len(parts) + 1))


def _with_wildcards(key: str) -> str:
    """Replace list indices in a dotted key by `*`."""
    return ".".join("*" if part.isdigit() else part for part in key.split("."))


def flatten(value: Any, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested settings with their dotted keys."""
    items: Any = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if items is None or not value:
        yield prefix, value
        return
    for key, inner in items:
        yield from flatten(inner, f"{prefix}.{key}" if prefix else str(key))


def newest_of_same_run(
    checkpoints: CheckpointManager, config: RunConfig, *, hashed: bool = True
) -> NewestCheckpoint | None:
    """Return the newest complete checkpoint, which `config` can continue from, or None without checkpoints.

    hashed: as for `CheckpointManager.newest`. Raises CheckpointError if it belongs to another run or all are damaged.
    """
    newest = checkpoints.newest(hashed=hashed)
    if newest is not None:
        progress = newest.progress
        require_same_run(progress.settings, identity(config), str(checkpoints.path(progress.step)))
    return newest


def require_same_run(saved: Mapping[str, object], current: Mapping[str, object], checkpoint: str) -> None:
    """Raise CheckpointError, naming the settings that differ, if the checkpoint belongs to another run."""
    old = {**_OLD_VALUES, "reward.extract.type": "boxed" if saved.get("reward.type") == "math" else "last_turn"}
    missing = {key: old[pattern] for key in current if (pattern := _with_wildcards(key)) in old}
    saved = _bound({**missing, **saved})  # an older version may have stored settings that are free now
    differing = [key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)]
    if not differing:
        return
    examples = "; ".join(f"{key}={current.get(key)!r}, there {saved.get(key)!r}" for key in differing[:5])
    more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
    raise CheckpointError(
        f"{checkpoint} is a checkpoint of another run: {examples}{more}; restore these settings, or start anew with "
        "another run.output_dir"
    )
