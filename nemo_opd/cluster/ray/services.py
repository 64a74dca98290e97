"""Ray's own processes, without which it answers nothing, and ends this process after a minute without a word."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psutil
import ray
from ray._private import services as ray_services

from nemo_opd.cluster.failure import CONTINUE
from nemo_opd.errors import ClusterError

NAMES = ("gcs_server", "raylet")
CONNECT_S = 5.0
GONE_S = 30.0
"""Longest wait for killed processes: the kernel first frees what they hold."""


@contextmanager
def in_a_session_of_their_own() -> Iterator[None]:
    """Inside, Ray starts its processes apart from this one's process group.

    What a terminal that is closed sends to all of the group, or timeout(1), is for the driver, whose step needs Ray.
    """
    internal: Any = ray_services  # Ray has no setting for it
    popen = internal.ConsolePopen
    internal.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        internal.ConsolePopen = popen


class Services:
    """Those that a run depends on, to be asked whether they are still there."""

    def __init__(self, processes: Sequence[psutil.Process] = (), address: str | None = None) -> None:
        """processes: on this machine, and ours. address: `host:port` where somebody else's cluster is controlled."""
        self._processes = {process: process.name() for process in processes}
        self._address = address

    @classmethod
    def among(cls, processes: Iterable[psutil.Process]) -> Services:
        """Those of a local cluster's processes."""
        return cls([process for process in processes if process.name() in NAMES])

    @classmethod
    def elsewhere(cls) -> Services:
        """To be called behind `ray.init` for a running cluster."""
        return cls(address=ray.get_runtime_context().gcs_address)

    @property
    def are_alive(self) -> bool:
        return not self._ended()

    def require_alive(self) -> None:
        """Raises ClusterError, so that nobody waits for an answer that cannot come."""
        if ended := self._ended():
            raise ClusterError(
                f"{' and '.join(ended)} ended, and the workers with it. If that was a signal to all of the run's "
                "processes, send it to the first one alone, which then saves a checkpoint; else memory may have run "
                f"out, or /dev/shm ({shared_memory_left()}). {CONTINUE}"
            )

    def _ended(self) -> list[str]:
        ended = [f"Ray's own {name}" for process, name in self._processes.items() if has_ended(process)]
        if self._address is not None and not answers(self._address):
            ended.append(f"the Ray cluster's head at {self._address}")
        return ended


def has_ended(process: psutil.Process) -> bool:
    """Also where its parent has not yet asked for its status."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def of_sessions(leaders: Collection[int]) -> list[psutil.Process]:
    """All processes in the sessions that these process ids have begun, whoever has started them."""
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) in leaders and not has_ended(process):
                found.append(process)
    return found


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill those that are still there, and return when they are gone, or after `GONE_S`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    # psutil's own wait takes a zombie that nobody reaps, as in some containers, for alive.
    limit = time.monotonic() + GONE_S
    while not all(has_ended(process) for process in processes) and time.monotonic() < limit:
        time.sleep(0.01)


def answers(address: str) -> bool:
    """Whether something listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except OSError:
        return False
    return True


def shared_memory_left() -> str:
    try:
        return f"{psutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free"
    except OSError:
        return "which cannot be read"
