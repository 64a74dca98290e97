"""Command line of bubblewrap."""

from collections.abc import Sequence

_DEVICES = ("null", "zero", "full", "random", "urandom")
PROGRAM = "bwrap"


def arguments(readable: Sequence[str], links: Sequence[tuple[str, str]], scratch_bytes: int) -> list[str]:
    """Return the prefix of the command: new namespaces of all kinds, a read-only file system, and a separate /tmp."""
    return [
        PROGRAM,
        *("--unshare-user", "--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"),
        *("--die-with-parent", "--as-pid-1", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"),
        *(word for path in readable for word in ("--ro-bind", path, path)),
        *(word for path, target in links for word in ("--symlink", target, path)),
        *(word for name in _DEVICES for word in ("--dev-bind", f"/dev/{name}", f"/dev/{name}")),
        # Read-only, since root on the machine could write to /proc/sys.
        *("--proc", "/proc", "--remount-ro", "/proc"),
        *("--size", str(scratch_bytes), "--tmpfs", "/tmp", "--remount-ro", "/", "--"),
    ]
