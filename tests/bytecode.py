"""Bytecode that the processes of all test sessions share.

Where Python may write none and no installer has, each of the hundred processes that tests start compiles torch,
transformers and what these import anew: more than half of the time that it takes to start.
"""

import os
import stat
import sys
import tempfile
from pathlib import Path


def share() -> None:
    """Where nothing may be written beside the sources: a folder of this user's for this process and its children."""
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
    """Nobody else can have put code there."""
    found = folder.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077
