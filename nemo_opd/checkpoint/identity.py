"""The settings that identify a run: a checkpoint written with other values belongs to another run.

Settings for speed, placement, reporting, length and the way to obtain the same samples are marked `MayChange`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, get_args

from pydantic import BaseModel

from nemo_opd.checkpoint.manager import CheckpointManager, NewestCheckpoint
from nemo_opd.config.base import may_change
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.errors import CheckpointError


def fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, bool]]:
    """Yield the dotted key of each value, and of each section that may change in full, and whether it may change.

    The key of a list's element is `*`.
    """
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        sections, is_list = _sections(field.annotation)
        if not sections or may_change(field):
            yield key, may_change(field)
            continue
        for section in sections:
            yield from fields(section, f"{key}.*." if is_list else f"{key}.")


def _sections(annotation: Any) -> tuple[list[type[BaseModel]], bool]:
    """Return the classes that a field may hold, and whether it holds a list of them."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation], False
    inner = [_sections(argument) for argument in get_args(annotation)]
    is_list = getattr(annotation, "__origin__", None) is tuple
    return [model for models, _ in inner for model in models], is_list or any(many for _, many in inner)


FREE_KEYS = frozenset(key for key, is_free in fields(RunConfig) if is_free)
"""Dotted keys of settings that may change, with `*` for list indices."""


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
    """Drop the settings that may change."""
    return {key: value for key, value in settings.items() if not _is_free(key)}


def _is_free(key: str) -> bool:
    """Return whether a setting or one of its sections may change."""
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
    saved = _bound({**missing, **saved})  # an older version may have stored settings that may change now
    differing = [key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)]
    if not differing:
        return
    examples = "; ".join(f"{key}={current.get(key)!r}, there {saved.get(key)!r}" for key in differing[:5])
    more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
    raise CheckpointError(
        f"{checkpoint} is a checkpoint of another run: {examples}{more}; restore these settings, or start anew with "
        "another run.output_dir"
    )
