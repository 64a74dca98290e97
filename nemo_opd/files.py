"""Files that are complete or absent, and survive a power failure."""

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
"""Number of characters that `tempfile` adds to a prefix."""


def write_atomically(path: Path, content: bytes, *, instead: str = ELSEWHERE) -> None:
    """Replace `path` atomically: readers, even after a kill, see the old file or the new one, never a part.

    Raises StorageError if it cannot be written. instead: an alternative for the user.
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
    """Create a temporary file for `path`, locked while its handle is open if the file system has locks."""
    while True:
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        if os.fstat(handle).st_nlink:
            return handle, temporary
        os.close(handle)  # it was removed as abandoned before it was locked


def remove_abandoned(folder: Path, names: str) -> None:
    """Remove files that a killed `write_atomically` left in a folder, but no files of a live writer.

    names: pattern of the final file names.
    """
    for path in folder.glob(f".{names}.{'?' * _RANDOM}"):
        # Kept on file systems without locks, and if owned by another user.
        with suppress(OSError), path.open("r+b") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """Yield a path for a folder that atomically replaces `folder` at the end; an error in the block keeps the old
    folder.

    Raises StorageError if that is not possible.
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
    """Replace a folder by a copy of another. Raises StorageError if it cannot be written."""
    with replacing(folder) as temporary, storage_errors(folder):
        shutil.copytree(source, temporary)
        settle(temporary)


def write_synced(path: Path, content: bytes) -> None:
    """Write a file and return when it is on the disk. Raises OSError."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def settle(folder: Path) -> None:
    """Give all files below `folder` the umask's mode, and wait until all are on the disk, the folders last.

    Some libraries write through temporary files, which are private.
    """
    mode = umask_mode()
    for path in files_below(folder):
        if path.stat().st_mode & 0o777 != mode:
            with suppress(PermissionError):  # some file systems have one mode for all files
                path.chmod(mode)
        sync(path)
    for path in (*(path for path in sorted(folder.rglob("*"), reverse=True) if path.is_dir()), folder):
        sync(path)


def size_below(folder: Path) -> int:
    """Return the total bytes of the files below a folder; files may vanish meanwhile."""
    total = 0
    for path in files_below(folder):
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def files_below(folder: Path) -> Iterator[Path]:
    return (path for path in sorted(folder.rglob("*")) if path.is_file())


def sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # file systems that cannot sync folders
            raise
    finally:
        os.close(handle)


def umask_mode() -> int:
    """Return the mode of a new file."""
    # os.umask can only be read by setting it, which would affect other threads, so ask the kernel first.
    with suppress(OSError):
        if match := re.search(r"^Umask:\s*([0-7]+)", Path("/proc/self/status").read_text(), re.MULTILINE):
            return 0o666 & ~int(match.group(1), 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return 0o666 & ~mask
