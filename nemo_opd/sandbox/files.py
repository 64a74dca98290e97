"""Files that a program sees: this Python and the system's libraries."""

import os
import sys
from pathlib import Path

INSIDE = Path(__file__).with_name("inside")
"""The scripts that run in a sandbox, with the standard library alone."""
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_LIBRARIES = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")


def shown() -> list[str]:
    """Return the folders and files to be read."""
    python = os.path.realpath(sys.executable)
    own = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(python)), str(INSIDE)]
    folders = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    paths = {*filter(os.path.exists, (*own, *_LIBRARIES)), *folders}
    return sorted(path for path in paths if not any(path.startswith(f"{other}/") for other in paths))


def links() -> list[tuple[str, str]]:
    """Return the symbolic links of the file system's root that programs need, each with its target."""
    return [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)]
