"""The first process of a sandbox: it sets limits, starts the program, watches it, and ends all its processes.

Run as a script with only the standard library: `supervise.py ORDER PROGRAM ARGUMENT …`. ORDER holds the fields of
`_Order` as JSON. The report goes to descriptor `report_to`: `started`, then JSON once the program has ended.
"""

import contextlib
import ctypes
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator, Sequence

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import isolation

_INTERVAL_S = 0.02
"""Longest time between two checks of the program's processes."""
_LEAVING_S = 1.0
"""Time for the program's children to end after it."""
_AWAITED = (signal.SIGCHLD, signal.SIGTERM)
_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_CHILD_SUBREAPER = 1, 4, 36
_TICK_S = 1 / os.sysconf("SC_CLK_TCK")
_PAGE = os.sysconf("SC_PAGE_SIZE")
_libc = ctypes.CDLL(None, use_errno=True)


class _Order:
    """Limits, visible files and descriptors of the program, as written by nemo_opd.sandbox.process."""

    isolation: str
    parent: int
    """Process that started the sandbox."""
    cpu_s: float
    """Processor time of all processes together."""
    wall_s: float
    memory_bytes: int
    """Resident memory of all processes together, and address space per process."""
    processes: int
    readable: Sequence[str]
    links: Sequence[Sequence[str]]
    scratch: str
    scratch_bytes: int
    report_to: int
    """Descriptor of the report."""
    inherited: Sequence[int]
    """Descriptors that the program inherits."""

    def __init__(self, text: str) -> None:
        vars(self).update(json.loads(text))


def main() -> None:
    order, command = _Order(sys.argv[1]), sys.argv[2:]
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    # With isolation=none, this process must end the program's processes itself, so it gets a signal to catch.
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM if order.isolation == "none" else signal.SIGKILL, 0, 0, 0)
    if order.isolation != "bubblewrap" and os.getppid() != order.parent:
        return
    for descriptor in {*map(int, os.listdir("/proc/self/fd"))} - {0, 1, 2, order.report_to, *order.inherited}:
        with contextlib.suppress(OSError):
            os.set_inheritable(descriptor, False)
    os.set_inheritable(order.report_to, False)
    if order.isolation == "namespaces":
        isolation.enter_namespaces(order.readable, order.links, order.scratch_bytes)
    else:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    # The program, which has the same owner, must not read or trace this process.
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
    os.write(order.report_to, b"started\n")
    child = os.fork()
    if not child:
        _exec_program(order, command)
    for descriptor in (0, 1, 2, *order.inherited):  # so that readers of the program's output see its end
        os.close(descriptor)
    report = _watch(child, order)
    if order.isolation == "none":  # otherwise the kernel does it when this process ends
        _end_all(child)
    os.write(order.report_to, json.dumps(report).encode())
    os._exit(0)


def _exec_program(order: _Order, command: list[str]) -> None:
    """Replace this process by the program. A limit that cannot be set is reported as `broken`."""
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        os.setsid()
        os.chdir(order.scratch)
        for limit, value in (
            (resource.RLIMIT_CORE, 0),
            (resource.RLIMIT_CPU, int(order.cpu_s) + 1),
            (resource.RLIMIT_AS, order.memory_bytes),
            (resource.RLIMIT_FSIZE, order.scratch_bytes),
            (resource.RLIMIT_NOFILE, 256),
            (resource.RLIMIT_MSGQUEUE, 0),
            (resource.RLIMIT_MEMLOCK, 0),
        ):
            _limit(limit, value)
        if order.isolation != "none":
            _limit(resource.RLIMIT_NPROC, order.processes + 1)  # outside of a namespace, it counts all of the user's
            isolation.filter_calls()
        os.dup2(os.open("/dev/null", os.O_WRONLY), 2)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
        os.execv(command[0], command)
    except BaseException as error:
        os.write(order.report_to, json.dumps({"ended": "broken", "why": str(error)}).encode())
    finally:
        os._exit(1)


def _limit(kind: int, value: int) -> None:
    hard = resource.getrlimit(kind)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(kind, (value, value))


def _watch(child: int, order: _Order) -> dict[str, object]:
    """Return how the program ended: by itself, with a status, or at one of its limits."""
    start, ended = time.monotonic(), None
    while True:
        has_ended, status = _reap(child)
        if has_ended:
            ended = time.monotonic(), status
        cpu_s, memory, number = _usage()
        if ended is not None and not number:
            return {"ended": "itself", "status": ended[1]}
        if ended is not None and time.monotonic() - ended[0] > _LEAVING_S:
            return {"ended": "processes left behind"}
        if cpu_s + sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2]) > order.cpu_s:
            return {"ended": "processor time"}
        if time.monotonic() - start > order.wall_s:
            return {"ended": "time"}
        if memory > order.memory_bytes:
            return {"ended": "memory"}
        if number > order.processes:
            return {"ended": "processes"}
        event = signal.sigtimedwait(_AWAITED, _INTERVAL_S)
        if event is not None and event.si_signo == signal.SIGTERM:
            return {"ended": "order"}


def _reap(child: int) -> tuple[bool, int]:
    """Reap all ended processes; return whether `child` is one of them, and its status."""
    has_ended, child_status = False, 0
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            if pid == child:
                has_ended, child_status = True, os.waitstatus_to_exitcode(status)
    return has_ended, child_status


def _usage() -> tuple[float, int, int]:
    """Return the program's processor seconds, resident bytes, and number of threads of all processes."""
    ticks = pages = number = 0
    for fields in _descendants():
        ticks += sum(map(int, fields[11:15]))
        number += int(fields[17])
        pages += int(fields[21])
    return ticks * _TICK_S, pages * _PAGE, number


def _descendants() -> Iterator[list[str]]:
    """Yield /proc/PID/stat of each process below this one, from the state (field 3) on, with the PID appended."""
    by_parent: dict[int, list[tuple[int, list[str]]]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].decode().split()
            by_parent.setdefault(int(fields[1]), []).append((int(name), fields))
    waiting = [os.getpid()]
    while waiting:
        for pid, fields in by_parent.pop(waiting.pop(), []):
            waiting.append(pid)
            yield [*fields, str(pid)]


def _end_all(child: int) -> None:
    """Kill the program's process group at once, then the remaining processes below this one."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)
    while pids := [int(fields[-1]) for fields in _descendants()]:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)


if __name__ == "__main__":
    main()
