"""Write errors as one sentence: the file, the reason, the free space, the way out."""

import errno
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.filesize import decimal

from nemo_opd.errors import OPDError, StorageError

FULL = {errno.ENOSPC, errno.EDQUOT}
OF_THE_DISK = FULL | {errno.EIO, errno.EROFS, errno.EFBIG}
"""Never caused by a mistake in the program."""
ELSEWHERE = "choose another run.output_dir"
"""Way out for a run."""
_WAYS_OUT = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.EIO: "check the disk",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "change its permissions",
    errno.EPERM: "change its permissions",
}
"""Ways out by error number."""
_RUST_ERROR = re.compile(r"\(os error (\d+)\)")
"""End of the errors of safetensors and tokenizers, which are not OSErrors."""


def error_number(error: BaseException | None) -> int | None:
    """Return the system's error number of `error` or of its cause, or None for other errors."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if (match := _RUST_ERROR.search(str(error))) is not None:
        return int(match.group(1))
    # After a write error, torch's archive writer raises a second error.
    cause = None if error is None else error.__cause__ or error.__context__
    number = None if cause is None else error_number(cause)
    return number if number in OF_THE_DISK else None


@contextmanager
def storage_errors(
    path: Path,
    kind: type[OPDError] = StorageError,
    *,
    needed: int | None = None,
    instead: str = ELSEWHERE,
) -> Iterator[None]:
    """Turn an operating system error in the block into `kind`, with one sentence about `path`.

    needed: total bytes, if known. instead: an alternative for the user. Other errors pass, including network errors.
    """
    try:
        yield
    except (OPDError, ConnectionError, TimeoutError):
        raise
    except Exception as error:
        if (number := error_number(error)) is None:
            raise
        raise kind(refusal(path, number, needed=needed, instead=instead)) from error


def refusal(path: Path, number: int, *, needed: int | None = None, instead: str = ELSEWHERE) -> str:
    """Return why `path` could not be written, and the way out."""
    reason = os.strerror(number)
    if number in FULL:
        reason += f"; {room(path, needed)}"
    way_out = f"{_WAYS_OUT[number]}, or {instead}" if number in _WAYS_OUT else instead
    return f"{path} could not be written ({reason}); {way_out}"


def require_room(path: Path, needed: int, what: str, *, instead: str, kind: type[OPDError] = StorageError) -> None:
    """Raise `kind` if the file system of `path` has less free space than `needed` bytes."""
    if free_bytes(path) < needed:
        raise kind(f"{path}: no room for {what} ({room(path, needed)}); free some space, or {instead}")


def room(path: Path, needed: int | None) -> str:
    """Return the bytes needed, if known, and the bytes free, with a note if the file system has no inodes left."""
    free = f"{decimal(free_bytes(path))} free"
    files = os.statvfs(existing(path))
    if files.f_files and not files.f_favail:
        free += " but no more files can be created"
    return free if needed is None else f"{decimal(needed)} needed, {free}"


def free_bytes(path: Path) -> int:
    """Return the bytes that an ordinary user may still write at `path`, or sys.maxsize without a limit."""
    usage = shutil.disk_usage(existing(path))
    return usage.free if usage.total else sys.maxsize


def existing(path: Path) -> Path:
    """Return the path, or its nearest existing parent."""
    # Path.exists raises if a parent folder is not accessible.
    return next(folder for folder in (path, *path.absolute().parents) if os.path.exists(folder))
