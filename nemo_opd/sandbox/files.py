"""Files that a sandboxed program can read: this Python and the system's libraries."""

import os
import sys
from pathlib import Path

INSIDE = Path(__file__).with_name("inside")
"""Scripts that run in a sandbox, with only the standard library."""
_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64", "/lib32", "/libx32")
_LIBRARIES = ("/usr", "/etc/ld.so.cache", "/etc/alternatives")


def readable() -> list[str]:
    """Return the folders and files that programs can read."""
    executable = os.path.realpath(sys.executable)
    python = [sys.prefix, sys.base_prefix, os.path.dirname(os.path.dirname(executable)), str(INSIDE)]
    folders = [path for path in _SYSTEM if os.path.isdir(path) and not os.path.islink(path)]
    paths = {*filter(os.path.exists, (*python, *_LIBRARIES)), *folders}
    return sorted(path for path in paths if not any(path.startswith(f"{parent}/") for parent in paths))


def links() -> list[tuple[str, str]]:
    """Return the symbolic links at the root of the file system that programs need, each with its target."""
    return [(path, os.readlink(path)) for path in _SYSTEM if os.path.islink(path)]
