"""Cache folders that cannot be written to, or that another process has locked."""

import errno
import fcntl
import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nemo_opd.disk import FULL, error_number, refusal
from nemo_opd.errors import OPDError, StorageError

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
