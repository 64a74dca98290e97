"""Separate namespaces and file system for a program, set up as by bubblewrap."""

import ctypes
import os
import signal
import stat
import struct
from collections.abc import Sequence

_NEWNS, _NEWCGROUP, _NEWUTS, _NEWIPC = 0x00020000, 0x02000000, 0x04000000, 0x08000000
_NEWUSER, _NEWPID, _NEWNET = 0x10000000, 0x20000000, 0x40000000
_RDONLY, _NOSUID, _NODEV, _NOEXEC, _BIND, _REC, _PRIVATE = 1, 2, 4, 8, 4096, 16384, 1 << 18
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
_MOUNT_SETATTR, _AT_RECURSIVE = 442, 0x8000
_DETACH = 2
_PR_SET_PDEATHSIG, _PR_CAPBSET_DROP = 1, 24
_CAPABILITY_VERSION = 0x20080522
_libc = ctypes.CDLL(None, use_errno=True)


def enter(readable: Sequence[str], links: Sequence[Sequence[str]], scratch_bytes: int) -> None:
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
    for name in ("null", "zero", "full", "random", "urandom"):
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
