"""Errors of writing as one sentence: the file, the reason, the room there is, the way out."""

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
"""Never a mistake of the program."""
ELSEWHERE = "choose another run.output_dir"
"""Way out of a run."""
_WAYS_OUT = {
    errno.ENOSPC: "free some space",
    errno.EDQUOT: "free some space, or have the quota raised",
    errno.EFBIG: "raise the limit on a file's size (ulimit -f)",
    errno.EIO: "check the disk",
    errno.EROFS: "mount it for writing",
    errno.EACCES: "change its permissions",
    errno.EPERM: "change its permissions",
}
"""Ways out by the number of the error."""
_OF_RUST = re.compile(r"\(os error (\d+)\)")
"""End of the errors of safetensors and tokenizers, which are no OSError."""


def error_number(error: BaseException | None) -> int | None:
    """Return the number of the system's error that `error` is or was raised after; None where it is of another kind."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if (found := _OF_RUST.search(str(error))) is not None:
        return int(found.group(1))
    # torch's writer of archives raises a second error after one of writing.
    before = None if error is None else error.__cause__ or error.__context__
    number = None if before is None else error_number(before)
    return number if number in OF_THE_DISK else None


@contextmanager
def storage_errors(
    path: Path,
    kind: type[OPDError] = StorageError,
    *,
    needed: int | None = None,
    instead: str = ELSEWHERE,
) -> Iterator[None]:
    """Raise `kind`, in one sentence about `path`, for an error of the operating system inside.

    needed: bytes in all, where known. instead: what else can be done. Other errors pass, those of a network among
    them.
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
    """Raise `kind` where the file system of `path` has less room than `needed` bytes."""
    if free_bytes(path) < needed:
        raise kind(f"{path}: no room for {what} ({room(path, needed)}); free some space, or {instead}")


def room(path: Path, needed: int | None) -> str:
    """Return what is needed, where known, and what is free; no further file may be the reason too."""
    free = f"{decimal(free_bytes(path))} free"
    files = os.statvfs(existing(path))
    if files.f_files and not files.f_favail:
        free += " but no further file can be made"
    return free if needed is None else f"{decimal(needed)} needed, {free}"


def free_bytes(path: Path) -> int:
    """Return what an ordinary user may still write where `path` is or is to be; any number where there is no limit."""
    usage = shutil.disk_usage(existing(path))
    return usage.free if usage.total else sys.maxsize


def existing(path: Path) -> Path:
    """Return the path, or the nearest folder above it that is there."""
    # Path.exists raises where a folder above may not be looked into.
    return next(each for each in (path, *path.absolute().parents) if os.path.exists(each))
