"""The folder of a local Ray session's sockets and logs, which is removed after the run."""

import fcntl
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from nemo_opd.errors import ClusterError

_PREFIX = "opd_"
LOCK = "owner.lock"
_FOR_RAY = "ray"
_RECREATED_S = 60.0
"""Minimum age of a recreated folder that is no longer in use."""


class SessionFolder:
    """A new folder under /tmp, removed by `close`, or by this user's next run if its owner was killed.

    The owner holds a lock on a file in it, which the kernel releases when the process ends.
    """

    def __init__(self, root: Path = Path("/tmp")) -> None:
        """Create the folder in /tmp instead of `$TMPDIR`, because paths of sockets are limited to 107 bytes.

        Raises ClusterError if it cannot be created.
        """
        remove_abandoned(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        except OSError as error:
            raise ClusterError(
                f"Ray needs a folder for its sockets under {root}, which cannot be created ({error.strerror}); make "
                f"{root} writable, or start Ray elsewhere with `ray start --head` and give cluster.address"
            ) from error
        temporary = self.path / f"{LOCK}.new"
        self._lock = temporary.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Rename it only after locking it: other runs treat an unlocked file as abandoned.
        temporary.rename(self.path / LOCK)

    @property
    def for_ray(self) -> Path:
        """Subfolder for Ray, which makes it readable for all users; the session folder itself stays private."""
        return self.path / _FOR_RAY

    def processes(self) -> list[psutil.Process]:
        """Return this process's children that have the folder on their command line, and their descendants."""
        processes = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if any(str(self.path) in argument for argument in child.cmdline()):
                    processes += [child, *child.children(recursive=True)]
        return processes

    def close(self) -> None:
        """Remove the folder; may be called again."""
        _remove(self.path)
        self._lock.close()


def remove_abandoned(root: Path) -> None:
    """Remove session folders whose owners are gone, except folders of other users."""
    for file in root.glob(f"{_PREFIX}*/{LOCK}"):
        with suppress(OSError), file.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(file.parent)
    for folder in root.glob(f"{_PREFIX}*/{_FOR_RAY}"):
        with suppress(OSError):
            if _is_recreated(folder):
                shutil.rmtree(folder.parent, ignore_errors=True)


def _is_recreated(folder: Path) -> bool:
    """Return whether an orphaned Ray process has recreated its folder after the session was removed."""
    names = {path.name for path in folder.parent.iterdir()} | {path.name.partition("_")[0] for path in folder.iterdir()}
    return names == {_FOR_RAY, "session"} and time.time() - folder.parent.stat().st_mtime > _RECREATED_S


def _remove(folder: Path) -> None:
    """Remove a session folder, its lock last; if an ending process recreates files, the next run removes them."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True)
        if [path.name for path in folder.iterdir()] == [LOCK]:
            shutil.rmtree(folder)
