"""The folder of a local Ray session: its sockets and logs, which nobody needs after the run."""

import fcntl
import shutil
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from nemo_opd.errors import ClusterError

PREFIX = "opd_"
LOCK = "owner.lock"
FOR_RAY = "ray"
PUT_BACK_S = 60.0
"""Age from which nobody works on a folder that was made again."""


class SessionFolder:
    """A new folder under /tmp, removed by `close`, or by the next run of this user where its owner was killed.

    The owner holds a lock on a file inside, which the kernel releases with the process.
    """

    def __init__(self, root: Path = Path("/tmp")) -> None:
        """Under /tmp and not `$TMPDIR`, because the paths of sockets are limited to 107 bytes.

        Raises ClusterError where it cannot be made.
        """
        remove_abandoned(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
        except OSError as error:
            raise ClusterError(
                f"Ray needs a folder for its sockets under {root}, which cannot be made ({error.strerror}); make it "
                "writable, or start Ray elsewhere with `ray start --head` and give cluster.address"
            ) from error
        unnamed = self.path / f"{LOCK}.new"
        self._lock = unnamed.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Under its own name only once it is locked: others take a lock that is free for one whose owner is gone.
        unnamed.rename(self.path / LOCK)

    @property
    def for_ray(self) -> Path:
        """Inside the folder, which stays closed to other users: Ray opens what it is given to everybody."""
        return self.path / FOR_RAY

    def processes(self) -> list[psutil.Process]:
        """This process's children that have the folder on their command line, and all that these have started."""
        found = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if any(str(self.path) in argument for argument in child.cmdline()):
                    found += [child, *child.children(recursive=True)]
        return found

    def close(self) -> None:
        """Remove the folder; may be called again."""
        remove(self.path)
        self._lock.close()


def remove_abandoned(root: Path) -> None:
    """Remove session folders whose owners are gone; those of other users stay."""
    for file in root.glob(f"{PREFIX}*/{LOCK}"):
        with suppress(OSError), file.open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            remove(file.parent)
    for folder in root.glob(f"{PREFIX}*/{FOR_RAY}"):
        with suppress(OSError):
            if is_put_back(folder):
                shutil.rmtree(folder.parent, ignore_errors=True)


def is_put_back(folder: Path) -> bool:
    """Whether Ray's folder, and nothing else, was made again by an orphan of Ray, after its session was removed."""
    names = {path.name for path in folder.parent.iterdir()} | {path.name.partition("_")[0] for path in folder.iterdir()}
    return names == {FOR_RAY, "session"} and time.time() - folder.parent.stat().st_mtime > PUT_BACK_S


def remove(folder: Path) -> None:
    """Remove a session folder, its lock last: what a process that is ending puts back is left to the next run."""
    with suppress(OSError):
        for path in folder.iterdir():
            if path.name != LOCK:
                shutil.rmtree(path, ignore_errors=True)
        if [path.name for path in folder.iterdir()] == [LOCK]:
            shutil.rmtree(folder)
