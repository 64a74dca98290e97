"""Directory of a run: its checkpoints, and a lock for one run at a time."""

import fcntl
import logging
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Self, TextIO

from nemo_opd.checkpoint.identity import newest_of_same_run
from nemo_opd.checkpoint.manager import CheckpointManager, NewestCheckpoint
from nemo_opd.config.run import RunConfig
from nemo_opd.config.run_fields import Run
from nemo_opd.errors import ConfigError
from nemo_opd.files import open_unlinked, storage_errors, write_obstacle

CHECKPOINTS, LOCK_NAME = "checkpoints", ".lock"
_LOG = logging.getLogger(__name__)


def resolve_output_dir(run: Run) -> Path:
    """Return the run's directory without creating it. Raises ConfigError if it or its checkpoints are not writable."""
    folder = run.output_dir or default_output_dir(run.name)
    for path in (folder, folder / CHECKPOINTS):
        if (obstacle := write_obstacle(path)) is not None:
            raise ConfigError(f"run.output_dir={folder}: {obstacle}; name another directory, or change its permissions")
    return folder


def checkpoints_of(config: RunConfig, output_dir: Path) -> CheckpointManager:
    return CheckpointManager(output_dir / CHECKPOINTS, config.train.keep_last)


def progress_to_resume(config: RunConfig, output_dir: Path, *, hashed: bool = True) -> NewestCheckpoint | None:
    """Return the checkpoint to continue from, or None in a new run.

    hashed: as for `CheckpointManager.newest`. Raises ConfigError if the directory has checkpoints and `run.resume` is
    not `auto`, and CheckpointError if the run cannot be continued.
    """
    checkpoints = checkpoints_of(config, output_dir)
    if config.run.resume == "auto":
        return newest_of_same_run(checkpoints, config, hashed=hashed)
    if steps := checkpoints.steps():
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


def is_locked(output_dir: Path) -> bool:
    """Return whether a process holds the lock of a run's directory."""
    try:
        with open_unlinked(output_dir / LOCK_NAME, "r") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no lock file, or a file system without locks
        return False
    return False


class RunLock:
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
                    raise ConfigError(self._in_use_message(file)) from None
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

    def _in_use_message(self, file: TextIO) -> str:
        file.seek(0)
        holder = file.read() or "another process"
        return (
            f"run.output_dir={self.path.parent} is in use by {holder}; wait until that run has ended, or name another "
            "directory"
        )

    def close(self) -> None:
        """Remove the file and release the lock."""
        self.path.unlink(missing_ok=True)
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
