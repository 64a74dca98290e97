"""Isolation of a program from the machine: namespaces, and a filter of system calls.

Namespaces and their file system are set up as by bubblewrap. Only the standard library is imported.
"""

import ctypes
import errno
import os
import signal
import stat
import struct
from collections.abc import Sequence

_libc = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS = 1, 22, 24, 38

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
DEVICES = ("null", "full", "random", "urandom")
"""Devices of a sandbox; not zero, whose shared mappings are memory that no limit counts."""
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_DETACH = 2
_CAPABILITY_VERSION = 0x20080522


def enter_namespaces(readable: Sequence[str], links: Sequence[Sequence[str]], scratch_bytes: int) -> None:
    """Continue as the first process of new namespaces; the calling process waits for it and exits with its status.

    readable: folders and files that are visible there; the machine's other files are not. links: symbolic links, each
    with its target. scratch_bytes: size of /tmp. Raises OSError if the kernel refuses.
    """
    uid, gid = os.getuid(), os.getgid()
    _do("unshare", _NEWUSER | _NEWPID | _NEWNET | _NEWIPC | _NEWUTS | _NEWCGROUP | _NEWNS)
    for name, value in (("setgroups", "deny"), ("uid_map", f"65534 {uid} 1"), ("gid_map", f"65534 {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(value)
    _fork_and_wait()
    _make_root(readable, links, scratch_bytes)
    _drop_capabilities()


def _fork_and_wait() -> None:
    """Return in the child, the first process of the PID namespace; the parent waits for it and exits."""
    outside = os.getpid()
    if not (child := os.fork()):
        _do("prctl", _PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() not in (0, outside):  # 0: the parent is outside of the namespace
            os._exit(1)
        return
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os._exit(status if status >= 0 else 128 - status)


def _make_root(readable: Sequence[str], links: Sequence[Sequence[str]], scratch_bytes: int) -> None:
    _mount("none", "/", None, _REC | _PRIVATE)
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/root")
    _mount("tmpfs", "/tmp/root", "tmpfs", _NOSUID | _NODEV, "mode=755,size=1m")
    os.mkdir("/tmp/root/old")
    _do("syscall", _PIVOT_ROOT[os.uname().machine], b"/tmp/root", b"/tmp/root/old")
    os.chdir("/")
    _do("umount2", b"/old/tmp", _DETACH)  # uncovers readable paths in /tmp
    for path in readable:
        _bind(f"/old{path}", path)
    for name in DEVICES:
        _bind(f"/old/dev/{name}", f"/dev/{name}", _NOSUID)
    for path, target in links:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        os.symlink(target, path)
    os.mkdir("/proc")
    _mount("proc", "/proc", "proc", _NOSUID | _NODEV | _NOEXEC)
    _set_flags("/proc", _RDONLY, recursive=False)  # root on the machine could write to /proc/sys
    _do("umount2", b"/old", _DETACH)
    os.rmdir("/old")
    os.mkdir("/tmp")
    _mount("tmpfs", "/tmp", "tmpfs", _NOSUID | _NODEV, f"mode=700,size={scratch_bytes}")
    _set_flags("/", _RDONLY, recursive=False)


def _bind(source: str, path: str, flags: int = _RDONLY | _NOSUID | _NODEV) -> None:
    """Bind-mount a folder or file at another path, with all mounts below it."""
    if stat.S_ISDIR(os.stat(source).st_mode):
        os.makedirs(path, exist_ok=True)
    elif not os.path.exists(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        open(path, "x").close()
    _mount(source, path, None, _BIND | _REC)
    _set_flags(path, flags)


def _set_flags(path: str, flags: int, *, recursive: bool = True) -> None:
    attributes = struct.pack("QQQQ", flags, 0, 0, 0)
    size = ctypes.c_size_t(len(attributes))
    _do("syscall", _MOUNT_SETATTR, -1, path.encode(), _AT_RECURSIVE * recursive, attributes, size)


def _drop_capabilities() -> None:
    for capability in range(64):
        _libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)  # fails beyond the last one
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION, 0)
    _do("capset", header, (ctypes.c_uint32 * 6)())


def _mount(source: str, target: str, kind: str | None, flags: int, options: str = "") -> None:
    file_system = kind.encode() if kind else None
    _do("mount", source.encode(), target.encode(), file_system, ctypes.c_ulong(flags), options.encode())


def _do(call: str, *arguments: object) -> None:
    if getattr(_libc, call)(*arguments) < 0:
        number = ctypes.get_errno()
        texts = " ".join(argument.decode() for argument in arguments if isinstance(argument, bytes))
        raise OSError(number, f"{call} {texts}: {os.strerror(number)}")


_NEW_NAMESPACES = 0x7E020080
"""Flags of clone: CLONE_NEWUSER, NEWPID, NEWNET, NEWIPC, NEWUTS, NEWCGROUP, NEWNS and NEWTIME."""
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
_CLONE = {"x86_64": 56, "aarch64": 220}
_CLONE3 = 435
_MMAP = {"x86_64": 9, "aarch64": 222}
_SHARED, _ANONYMOUS = 0x01, 0x20
_X32 = 0x40000000
"""First call number of the x32 ABI, whose calls are not in the tables above."""

_NUMBER_AT, _ARCHITECTURE_AT, _ARGUMENT_AT, _FOURTH_ARGUMENT_AT = 0, 4, 16, 40
_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_MODE_FILTER = 2


def filter_calls() -> None:
    """Forbid sockets except pairs, shared memory and access to other processes' memory, also for children.

    Namespaces and resource limits do not cover these: a virtual machine's sockets to its host (AF_VSOCK) are outside of
    any network namespace, shared memory (`shmget`, `memfd_create`, shared mappings without a file) does not count for
    any process, and a process is root in a nested namespace. Sets no filter on other machines than `_ARCHITECTURE`.
    Raises OSError if the kernel refuses.
    """
    if _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_NO_NEW_PRIVS)")
    machine = os.uname().machine
    if machine not in _ARCHITECTURE:
        return
    program = _filter(machine)
    code = ctypes.create_string_buffer(program)
    described = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(code)))
    if _libc.prctl(_PR_SET_SECCOMP, _MODE_FILTER, described, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_SECCOMP)")


def _filter(machine: str) -> bytes:
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
    for number in _FORBIDDEN[machine].values():
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
    steps += [
        (_EQUAL, 0, 4, _MMAP[machine]),
        (_LOAD, 0, 0, _FOURTH_ARGUMENT_AT),
        (_ANY_BIT, 0, 2, _SHARED),
        (_ANY_BIT, 0, 1, _ANONYMOUS),
        (_RETURN, 0, 0, denied),
    ]
    steps.append((_RETURN, 0, 0, _ALLOW))
    return b"".join(struct.pack("HBBI", *step) for step in steps)
