"""The settings that a checkpoint depends on: where they change, it belongs to another run."""

from collections.abc import Iterator, Mapping
from typing import Any

from nemo_opd.checkpoint.free_settings import FREE_KEYS
from nemo_opd.checkpoint.manager import CheckpointManager, Found
from nemo_opd.config.run import RunConfig
from nemo_opd.errors import CheckpointError


def identity(config: RunConfig) -> dict[str, object]:
    """Return the value of every setting that a run's results depend on, by dotted key."""
    return _bound(dict(flatten(config.model_dump(mode="json"))))


def _bound(settings: Mapping[str, object]) -> dict[str, object]:
    """Return the settings, by dotted key, that must be the same to continue."""
    return {key: value for key, value in settings.items() if not _may_change(key)}


def _may_change(key: str) -> bool:
    """True for a dotted key that is free itself or in a free section."""
    parts = ["*" if part.isdigit() else part for part in key.split(".")]
    return any(".".join(parts[:depth]) in FREE_KEYS for depth in range(1, len(parts) + 1))


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
    saved = _bound(saved)  # an older version may have stored what is free now
    differing = [key for key in sorted(saved.keys() | current.keys()) if saved.get(key) != current.get(key)]
    if not differing:
        return
    shown = "; ".join(f"{key}={current.get(key)!r}, there {saved.get(key)!r}" for key in differing[:5])
    more = f" and {len(differing) - 5} more" if len(differing) > 5 else ""
    raise CheckpointError(
        f"{checkpoint} is a checkpoint of another run: {shown}{more}; restore these settings, or start anew with "
        "another run.output_dir"
    )
