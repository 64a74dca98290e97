"""Files that are whole or absent, and that stay after a power cut."""

import errno
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from nemo_opd.disk import ELSEWHERE, storage_errors

_RANDOM = 8
"""Characters that `tempfile` adds to a prefix."""


def write_atomically(path: Path, content: bytes, *, instead: str = ELSEWHERE) -> None:
    """Replace `path` at once: a reader, or a run that is killed, sees the old file or the new one, never a part.

    Raises StorageError where it cannot be written. instead: what can be done then.
    """
    with storage_errors(path, instead=instead):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = _locked_temporary(path)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
                os.chmod(temporary, umask_mode())
                os.replace(temporary, path)  # while it is locked
            sync(path.parent)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise


def _locked_temporary(path: Path) -> tuple[int, str]:
    """Create a file to be renamed to `path`, locked while its handle is open, where the file system has locks."""
    while True:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # it was taken for an abandoned one before it was locked


def remove_abandoned(folder: Path, names: str) -> None:
    """Remove what `write_atomically` has left in a folder where it was killed, and nothing of a writer that lives.

    names: pattern of the files that were to be written.
    """
    for path in folder.glob(f".{names}.{'?' * _RANDOM}"):
        # Of a file system without locks, or of another user, it stays.
        with suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a path for a folder that replaces `folder` at the end, at once; an error inside leaves the old one.

    Raises StorageError where that cannot be done.
    """
    temporary = folder.with_name(f".{folder.name}.incomplete")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        yield temporary
        with storage_errors(folder):
            shutil.rmtree(folder, ignore_errors=True)
            temporary.rename(folder)
            sync(folder.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def copy_whole(source: Path, folder: Path) -> None:
    """Replace a folder by a copy of another. Raises StorageError where it cannot be written."""
    with replacing(folder) as temporary, storage_errors(folder):
        shutil.copytree(source, temporary)
        settle(temporary)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file, and return when it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def settle(folder: Path) -> None:
    """Give every file below `folder` the mode of the umask, and wait until all is on the disk, the folders last.

    Some libraries write through temporary files, which are private.
    """
    mode = umask_mode()
    for path in files_below(folder):
        if path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # some file systems have one mode for all
                path.chmod(mode)
        sync(path)
    for path in (*(each for each in sorted(folder.rglob("*"), reverse=True) if each.is_dir()), folder):
        sync(path)


def size_below(folder: Path) -> int:
    """Return the bytes of the files below a folder, some of which may be on their way out."""
    total = 0
    for path in files_below(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of a file system that cannot sync folders
            raise
    finally:
        os.close(handle)


def umask_mode() -> int:
    """Return the mode that a new file gets."""
    # Where the kernel says it: to ask with os.umask is to set it, also for what other threads write meanwhile.
    with suppress(OSError):
        if said := re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.MULTILINE):
            return 0o666 & ~int(said.group(1), 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask
