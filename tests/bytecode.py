"""A bytecode cache that all processes of the tests share.

Without bytecode beside the sources, each of the hundred processes that tests start compiles torch, transformers and
their imports again, which takes more than half of its start-up time.
"""

import os
import stat
import sys
import tempfile
from pathlib import Path


def share() -> None:
    """Keep bytecode in a private folder, also for child processes, if Python may not write it beside the sources."""
    if not sys.dont_write_bytecode:
        return
    folder = Path(tempfile.gettempdir()) / f"nemo_opd_bytecode_{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    if not is_private(folder):
        return
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)


def is_private(folder: Path) -> bool:
    """Return whether only this user can have put code there."""
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077
