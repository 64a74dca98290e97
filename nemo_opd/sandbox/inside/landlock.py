"""Access to files, limited by Landlock: for a process that shares the file system with everything else."""

import ctypes
import os
import struct
from collections.abc import Sequence

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_OF_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Rights to files by the version of the interface; later ones have 16."""
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3
_SIX = 6
_FOUR = 4


def version() -> int:
    """Return the version of the kernel's interface; 0 without Landlock."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), _GET_VERSION))


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Limit this process and all that it starts to these folders and files, and to no process outside.

    Paths that do not exist are left out. Raises OSError where the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = version()
    rights = (1 << _NUM_RIGHTS.get(abi, 16)) - 1
    rules = struct.pack("Q", rights)
    if abi >= _FOUR:
        rules += struct.pack("Q", _TCP)
    if abi >= _SIX:
        rules += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = libc.syscall(_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    _require(ruleset >= 0, "landlock_create_ruleset")
    for paths, wanted in ((readable, _READ), (writable, rights)):
        for path in filter(os.path.exists, paths):
            allowed = wanted if os.path.isdir(path) else wanted & _OF_FILES
            opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
            added = libc.syscall(_ADD, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, opened), 0)
            os.close(opened)
            _require(added == 0, "landlock_add_rule")
    _require(libc.syscall(_RESTRICT, ruleset, 0) == 0, "landlock_restrict_self")
    os.close(ruleset)


def _require(done: bool, call: str) -> None:
    if not done:
        raise OSError(ctypes.get_errno(), call)
