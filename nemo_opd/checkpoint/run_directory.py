"""Directory of a run: its checkpoints, whether they belong to the same run, and a lock for one run at a time."""

import fcntl
import logging
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO, get_args

from pydantic import BaseModel

from nemo_opd.checkpoint.manager import CheckpointManager, NewestCheckpoint
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import Run
from nemo_opd.config.settings import may_change
from nemo_opd.config.teacher import TeacherBase
from nemo_opd.errors import CheckpointError, ConfigError
from nemo_opd.files import open_unlinked, storage_errors, write_obstacle
from nemo_opd.types import Closing

CHECKPOINTS, LOCK_NAME = "checkpoints", ".lock"
_LOG = logging.getLogger(__name__)


def resolve_output_dir(run: Run) -> Path:
    """Return the run's directory without creating it. Raises ConfigError if it or its checkpoints are not writable."""
    folder = run.output_dir or default_output_dir(run.name)
    for path in (folder, folder / CHECKPOINTS):
        if (obstacle := write_obstacle(path)) is not None:
            raise ConfigError(f"run.output_dir={folder}: {obstacle}; name another directory")
    return folder


def checkpoints_of(config: RunConfig, output_dir: Path) -> CheckpointManager:
    return CheckpointManager(output_dir / CHECKPOINTS, config.train.keep_last)


def progress_to_resume(config: RunConfig, output_dir: Path, *, hashed: bool = True) -> NewestCheckpoint | None:
    """Return the checkpoint to continue from, or None in a new run.

    hashed: as for `CheckpointManager.newest`. Raises ConfigError if the directory has checkpoints and `run.resume` is
    not `auto`, and CheckpointError if it belongs to another run or all checkpoints are damaged.
    """
    checkpoints = checkpoints_of(config, output_dir)
    if config.run.resume == "auto":
        newest = checkpoints.newest(hashed=hashed)
        if newest is not None:
            progress = newest.progress
            require_same_run(progress.settings, identity(config), str(checkpoints.path(progress.step)))
        return newest
    if steps := checkpoints.steps():
        if (holder := lock_holder(output_dir)) is not None:
            raise ConfigError(_in_use_message(output_dir, holder))
        raise ConfigError(
            f"run.output_dir={output_dir} holds a run with a checkpoint at step {steps[-1]}; write run.resume=auto to "
            "continue it, or another run.output_dir"
        )
    return None


def require_not_beyond(step: int, total_steps: int, output_dir: Path) -> None:
    """Raise ConfigError if the checkpoint is beyond the last step of the settings."""
    if step > total_steps:
        raise ConfigError(
            f"run.output_dir={output_dir} is at step {step} and this run ends at {total_steps}; raise train.max_steps "
            "or train.epochs to continue it, or start anew with another run.output_dir"
        )


def default_output_dir(name: str) -> Path:
    stamp = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    folder = Path("outputs") / name / stamp
    for number in range(1, 1000):
        if not folder.exists():
            break
        folder = folder.with_name(f"{stamp}_{number}")
    return folder


def lock_holder(output_dir: Path) -> str | None:
    """Return the text on the process that holds the lock of a run's directory; None if none does."""
    # Without a lock file, or on a file system without locks, nobody holds it.
    with suppress(OSError), open_unlinked(output_dir / LOCK_NAME, "r") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return _holder(file)
    return None


def _holder(lock: TextIO) -> str:
    lock.seek(0)
    return lock.read() or "another process"


def _in_use_message(output_dir: Path, holder: str) -> str:
    return (
        f"run.output_dir={output_dir} is in use by {holder}; wait until that run has ended, or name another directory"
    )


class RunLock(Closing):
    """Advisory lock on a run directory; the kernel releases it when the process ends.

    The lock file names its holder for another run's error message; `close` removes it.
    """

    def __init__(self, output_dir: Path) -> None:
        """Create the directory and lock it. Raises ConfigError if another process holds the lock."""
        self.path = output_dir / LOCK_NAME
        with storage_errors(self.path):
            output_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._take()
            self._file.truncate(0)
            holder = f"process {os.getpid()} on host {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
            self._file.write(holder)
            self._file.flush()

    def _take(self) -> TextIO:
        while True:
            file = open_unlinked(self.path, "a+")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise ConfigError(_in_use_message(self.path.parent, _holder(file))) from None
            except OSError as error:
                _LOG.warning("%s cannot be locked (%s); make sure that no other run uses the folder", self.path, error)
            # The previous holder may have removed the file after we opened it; then lock the new one.
            if self._is_there(file):
                return file
            file.close()

    def _is_there(self, file: TextIO) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        return False

    def close(self) -> None:
        """Remove the file and release the lock."""
        self.path.unlink(missing_ok=True)
        self._file.close()


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
