"""One run at a time in a run directory."""

import fcntl
import logging
import os
import socket
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Self, TextIO

from nemo_opd.disk import storage_errors
from nemo_opd.errors import ConfigError

NAME = ".lock"
LOG = logging.getLogger(__name__)


class RunLock:
    """An advisory lock on a run directory, which the kernel releases with the process that holds it.

    The locked file names its holder for the message that another run gets, and is removed by `close`.
    """

    def __init__(self, output_dir: Path) -> None:
        """Make the directory where it is missing. Raises ConfigError where another process holds the lock."""
        self.path = output_dir / NAME
        with storage_errors(self.path):
            output_dir.mkdir(parents=True, exist_ok=True)
            self._file = self._take()
            self._file.truncate(0)
            self._file.write(holder())
            self._file.flush()

    def _take(self) -> TextIO:
        while True:
            file = self.path.open("a+", encoding="utf-8")
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                with file:
                    raise ConfigError(self._in_use(file)) from None
            except OSError as error:
                LOG.warning("%s cannot be locked (%s); see to it that no other run uses the folder", self.path, error)
            # A holder that was just leaving has removed the file that was locked here: lock the one that is there now.
            if self._is_there(file):
                return file
            file.close()

    def _is_there(self, file: TextIO) -> bool:
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), self.path.stat())
        return False

    def _in_use(self, file: TextIO) -> str:
        file.seek(0)
        by = file.read() or "another process"
        return (
            f"run.output_dir={self.path.parent} is in use by {by}; wait until that run has ended, or name another "
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


def holder() -> str:
    """Return how a message names this process."""
    return f"process {os.getpid()} on host {socket.gethostname()}, since {datetime.now():%Y-%m-%d %H:%M:%S}"
