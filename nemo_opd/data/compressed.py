"""Compressed files, unpacked once into the cache folder and within bounds."""

import bz2
import errno
import fcntl
import gzip
import hashlib
import logging
import lzma
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import IO, Any

import pyarrow as pa

from nemo_opd.errors import DataError, OPDError, StorageError
from nemo_opd.files import FULL, error_number, refusal, umask_mode
from nemo_opd.paths import cache_dir

_WRITE_ERRORS = FULL | {errno.EROFS, errno.EFBIG}
"""errno values that only writing raises: libraries read the user's files in the same call."""
WAIT_S = 2 * 3600.0
"""Seconds to wait for another process: long enough to convert 1.4 TB at 0.2 GB/s."""
_POLL_S = 0.5

_log = logging.getLogger(__name__)


@contextmanager
def writing(folder: Path, variable: str) -> Iterator[None]:
    """Raise a one-line StorageError if writing below `folder` fails inside; pass other errors on.

    variable: environment variable that names the folder.
    """
    try:
        yield
    except OPDError:
        raise
    except Exception as error:
        number = error_number(error)
        if number is None or not (number in _WRITE_ERRORS or _names_file_below(error, folder)):
            raise
        raise StorageError(refusal(folder, number, instead=elsewhere(variable))) from error


def _names_file_below(error: Exception, folder: Path) -> bool:
    name = getattr(error, "filename", None)
    return isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())


def elsewhere(variable: str) -> str:
    return f"set ${variable} to another folder"


def await_turn(lock: Path, variable: str) -> None:
    """Wait while another process holds the file's lock; libraries wait silently and without end.

    variable: environment variable that names the folder. Raises StorageError after WAIT_S.
    """
    deadline = time.monotonic() + WAIT_S
    if _is_held(lock):
        _log.warning("waiting for another process that converts the same data; it holds %s", lock)
    while _is_held(lock):
        if time.monotonic() > deadline:
            raise StorageError(
                f"another process has held {lock} for more than {WAIT_S:.0f} s; see whether it still works, end it, or "
                f"{elsewhere(variable)}"
            )
        time.sleep(_POLL_S)


def _is_held(lock: Path) -> bool:
    """Return whether another process has locked the file; False if the file system has no locks."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


BLOCK = 1 << 20
UNSUSPICIOUS = 1 << 30
"""Bytes that any file may unpack to."""
_MAX_EXPANSION = 200
"""Limit of a larger file's unpacked size, as a multiple of its size. Logs reach 50, a bomb 1,000 and more."""
_PART = ".part"
_ABANDONED_S = 3600.0
SPARE = 1 << 30
"""Bytes of the disk to leave free."""


def _zstd(path: Path) -> IO[bytes]:
    return pa.input_stream(str(path), compression="zstd")


_Opener = Callable[[Path], AbstractContextManager[Any]]
_OPENERS: dict[bytes, _Opener] = {
    b"\x1f\x8b": gzip.GzipFile,
    b"\x28\xb5\x2f\xfd": _zstd,
    b"BZh": bz2.BZ2File,
    b"\xfd7zXZ\x00": lzma.LZMAFile,
}
"""Openers keyed by a file's first bytes; its name does not matter."""


def uncompressed(path: Path, source: str) -> Path:
    """Return the file itself, or its unpacked copy if it is compressed with gzip, zstd, bzip2 or xz.

    source: the file's name in messages. Raises DataError if the file unpacks to an unreasonable size or to more than
    the disk holds, StorageError if the copy cannot be written, and the unpacker's error if the file is damaged.
    """
    opener = _opener(path)
    if opener is None:
        return path
    status = path.stat()
    identity = f"{path} {status.st_size} {status.st_mtime_ns}"
    folder = cache_dir("unpacked")
    target = folder / f"{hashlib.sha256(identity.encode()).hexdigest()[:32]}.jsonl"
    if not target.exists():
        _remove_abandoned(folder)
        limit = max(UNSUSPICIOUS, _MAX_EXPANSION * status.st_size)
        with writing(folder, "NEMO_OPD_CACHE"), NamedTemporaryFile(dir=folder, suffix=_PART, delete=False) as unpacked:
            try:
                with opener(path) as packed:
                    _copy(packed, unpacked, limit, source)
                unpacked.flush()
                os.fsync(unpacked.fileno())
                os.chmod(unpacked.name, umask_mode())
                # Caches of derived data are keyed by this time, so it must not depend on when the copy was made.
                os.utime(unpacked.name, ns=(status.st_mtime_ns, status.st_mtime_ns))
                Path(unpacked.name).rename(target)
            finally:
                Path(unpacked.name).unlink(missing_ok=True)
    return target


def _remove_abandoned(folder: Path) -> None:
    """Remove unfinished copies of killed runs. A copy that is still being unpacked changes all the time."""
    for part in folder.glob(f"*{_PART}"):
        with suppress(OSError):
            if time.time() - part.stat().st_mtime > _ABANDONED_S:
                part.unlink()


def _opener(path: Path) -> _Opener | None:
    with path.open("rb") as file:
        start = file.read(max(map(len, _OPENERS)))
    return next((opener for magic, opener in _OPENERS.items() if start.startswith(magic)), None)


def _copy(packed: IO[bytes], unpacked: IO[bytes], limit: int, source: str) -> None:
    folder = cache_dir()
    free = shutil.disk_usage(folder).free - SPARE
    size = 0
    while block := packed.read(BLOCK):
        size += len(block)
        if size > limit:
            raise DataError(
                f"{source} unpacks to more than {limit / 1e9:.1f} GB, {_MAX_EXPANSION} times its size, as no text "
                "does; unpack it yourself if you trust it"
            )
        if size > free:
            raise DataError(
                f"{source} unpacks to more than the {max(free, 0) / 1e9:.1f} GB that {folder} may take; set "
                "$NEMO_OPD_CACHE to a folder with more room, or unpack the file yourself"
            )
        unpacked.write(block)
