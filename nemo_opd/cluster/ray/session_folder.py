"""The folder of a local Ray session, with its sockets and logs; not needed after the run."""

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
_PUT_BACK_S = 60.0
"""Age from which a folder that was created again is no longer in use."""


class SessionFolder:
    """A new folder under /tmp, removed by `close`, or by the next run of this user where its owner was killed.

    The owner holds a lock on a file inside, which the kernel releases with the process.
    """

    def __init__(self, root: Path = Path("/tmp")) -> None:
        """Create the folder, in /tmp and not `$TMPDIR`: paths of sockets are limited to 107 bytes.

        Raises ClusterError where it cannot be created.
        """
        remove_abandoned(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        except OSError as error:
            raise ClusterError(
                f"Ray needs a folder for its sockets under {root}, which cannot be made ({error.strerror}); make it "
                "writable, or start Ray elsewhere with `ray start --head` and give cluster.address"
            ) from error
        unnamed = self.path / f"{LOCK}.new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Renamed only once it is locked: other runs take an unlocked file for one whose owner is gone.
        unnamed.rename(self.path / LOCK)

    @property
    def for_ray(self) -> Path:
        """Subfolder for Ray, which makes its folder readable for all users; the one around it stays private."""
        return self.path / _FOR_RAY

    def processes(self) -> list[psutil.Process]:
        """Return this process's children that have the folder on their command line, and their descendants."""
        found = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if any(str(self.path) in argument for argument in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
        return found

    def close(self) -> None:
        """Remove the folder; may be called again."""
        _remove(self.path)
        self._lock.close()


def remove_abandoned(root: Path) -> None:
    """Remove session folders whose owners are gone; those of other users stay."""
    for file in root.glob(f"{_PREFIX}*/{LOCK}"):
        with suppress(OSError), file.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _remove(file.parent)
    for folder in root.glob(f"{_PREFIX}*/{_FOR_RAY}"):
        with suppress(OSError):
            if _is_put_back(folder):
                shutil.rmtree(folder.parent, ignore_errors=True)


def _is_put_back(folder: Path) -> bool:
    """Return whether an orphan of Ray has created its folder again after the session was removed."""
    names = {path.name for path in folder.parent.iterdir()} | {path.name.partition("_")[0] for path in folder.iterdir()}
    return names == {_FOR_RAY, "session"} and time.time() - folder.parent.stat().st_mtime > _PUT_BACK_S


def _remove(folder: Path) -> None:
    """Remove a session folder, its lock last; the next run removes what a process that is ending creates again."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True)
        if [path.name for path in folder.iterdir()] == [LOCK]:
            shutil.rmtree(folder)
