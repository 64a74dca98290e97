"""Landlock limits of file access, for a process that shares the machine's file system."""

import ctypes
import os
import struct
from collections.abc import Sequence

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_GET_VERSION = 1
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_READ = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS = _EXECUTE | _WRITE_FILE | _READ_FILE
_NUM_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15}
"""Interface version → number of file rights; later versions have 16."""
_TCP = 3
_ABSTRACT_SOCKETS_AND_SIGNALS = 3


def version() -> int:
    """Return the version of the kernel's interface, or 0 without Landlock."""
    return max(0, ctypes.CDLL(None).syscall(_CREATE, None, ctypes.c_size_t(0), _GET_VERSION))


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Restrict this process and its children to these folders and files, and forbid access to processes outside.

    Missing paths are skipped. Raises OSError if the kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    abi = version()
    rights = (1 << _NUM_RIGHTS.get(abi, 16)) - 1
    rules = struct.pack("Q", rights)
    if abi >= 4:
        rules += struct.pack("Q", _TCP)
    if abi >= 6:
        rules += struct.pack("Q", _ABSTRACT_SOCKETS_AND_SIGNALS)
    ruleset = libc.syscall(_CREATE, rules, ctypes.c_size_t(len(rules)), 0)
    _require(ruleset >= 0, "landlock_create_ruleset")
    for paths, path_rights in ((readable, _READ), (writable, rights)):
        for path in filter(os.path.exists, paths):
            allowed = path_rights if os.path.isdir(path) else path_rights & _FILE_RIGHTS
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            status = libc.syscall(_ADD, ruleset, _PATH_BENEATH, struct.pack("=Qi", allowed, descriptor), 0)
            os.close(descriptor)
            _require(status == 0, "landlock_add_rule")
    _require(libc.syscall(_RESTRICT, ruleset, 0) == 0, "landlock_restrict_self")
    os.close(ruleset)


def _require(succeeded: bool, call: str) -> None:
    if not succeeded:
        raise OSError(ctypes.get_errno(), call)
