"""A system call filter: no sockets except pairs, no shared memory, no access to other processes' memory.

Namespaces and resource limits do not cover these: a virtual machine's sockets to its host (AF_VSOCK) are outside of any
network namespace, shared memory (`shmget`, `memfd_create`) does not count for any process, and a process is root in a
nested namespace.
"""

import ctypes
import errno
import os
import struct

_NEW_NAMESPACES = 0x7E020080
"""CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, NEWNS and NEWTIME."""
_FORBIDDEN = {
    "x86_64": {
        "shmget": 29, "shmat": 30, "socket": 41, "semget": 64, "msgget": 68, "ptrace": 101, "pivot_root": 155,
        "chroot": 161, "mount": 165, "umount2": 166, "add_key": 248, "request_key": 249, "keyctl": 250, "unshare": 272,
        "perf_event_open": 298, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "memfd_create": 319,
        "bpf": 321, "userfaultfd": 323, "io_uring_setup": 425, "memfd_secret": 447,
    },
    "aarch64": {
        "umount2": 39, "mount": 40, "pivot_root": 41, "chroot": 51, "unshare": 97, "ptrace": 117, "msgget": 186,
        "semget": 190, "shmget": 194, "shmat": 196, "socket": 198, "add_key": 217, "request_key": 218, "keyctl": 219,
        "perf_event_open": 241, "setns": 268, "process_vm_readv": 270, "process_vm_writev": 271, "memfd_create": 279,
        "bpf": 280, "userfaultfd": 282, "io_uring_setup": 425, "memfd_secret": 447,
    },
}  # fmt: skip
_ARCHITECTURE = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_SESSION = {"x86_64": {"setpgid": 109, "setsid": 112}, "aarch64": {"setpgid": 154, "setsid": 157}}
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_X32 = 0x40000000
"""First call number of the x32 ABI, whose calls are not in the tables above."""

_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT = 0, 4, 16
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_PR_SET_NO_NEW_PRIVS, _PR_SET_SECCOMP, _MODE_FILTER = 38, 22, 2


def restrict(*, keeps_session: bool) -> None:
    """Filter the system calls of this process and its children. On other machines than the two above, set no filter.

    keeps_session: forbid leaving the process group, so that all processes can be killed at once. Raises OSError if the
    kernel refuses.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    machine = os.uname().machine
    if machine not in _ARCHITECTURE:
        return
    program = _program(machine, keeps_session=keeps_session)
    code = ctypes.create_string_buffer(program)
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    if libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _program(machine: str, *, keeps_session: bool) -> bytes:
    """Return the filter in classic BPF, whose jumps count the instructions to skip."""
    denied = _ERRNO | errno.EPERM
    steps = [
        (_LOAD, 0, 0, _ARCHITECTURE_AT),
        (_EQUAL, 1, 0, _ARCHITECTURE[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        steps += [(_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, denied)]
    forbidden = {**_FORBIDDEN[machine], **(_SESSION[machine] if keeps_session else {})}
    for number in forbidden.values():
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, denied)]
    # The flags of clone3 are in memory, which a filter cannot read. The C library falls back to clone.
    steps += [(_EQUAL, 0, 1, _CLONE3), (_RETURN, 0, 0, _ERRNO | errno.ENOSYS)]
    steps += [
        (_EQUAL, 0, 4, _CLONE[machine]),
        (_LOAD, 0, 0, _ARGUMENT_AT),
        (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
        (_RETURN, 0, 0, denied),
        (_RETURN, 0, 0, _ALLOW),
    ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
