"""Ray's own processes, and the environment variables that workers get.

If Ray's processes end, Ray ends this process after a minute without a message.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import psutil
from ray._private import services as ray_services

from nemo_opd.cluster.group import CONTINUE
from nemo_opd.config.secrets import is_secret_name
from nemo_opd.errors import ClusterError

SERVICE_NAMES = ("gcs_server", "raylet")
"""Names of a local cluster's processes that a run depends on."""
_CONNECT_S = 5.0
_GONE_S = 30.0
"""Limit of the wait for killed processes, whose memory the kernel frees first."""
_PREFIXES = ("HF_", "HUGGING_FACE_", "TRANSFORMERS_", "NCCL_", "TORCH_", "PYTORCH_", "TORCHINDUCTOR_", "TRITON_")


@contextmanager
def in_new_session() -> Iterator[None]:
    """Make Ray start its processes outside this process's group.

    A closed terminal and timeout(1) signal the whole process group; the driver handles the signals, and needs Ray until
    its step is done.
    """
    internal: Any = ray_services  # Ray has no setting for this
    popen = internal.ConsolePopen
    internal.ConsolePopen = partial(popen, start_new_session=True)
    try:
        yield
    finally:
        internal.ConsolePopen = popen


class Services:
    """The Ray processes that a run depends on."""

    def __init__(self, processes: Sequence[psutil.Process] = (), address: str | None = None) -> None:
        """Store what to watch.

        processes: services of a cluster that this run has started. address: `host:port` of another cluster's head.
        """
        self._processes = {process: process.name() for process in processes}
        self._address = address

    @property
    def are_alive(self) -> bool:
        return not self._ended()

    def require_alive(self) -> None:
        """Raise ClusterError if a service has ended, so that no call waits for an answer."""
        if ended := self._ended():
            raise ClusterError(
                f"{' and '.join(ended)} ended, and the workers with it. If you sent a signal to all of the run's "
                "processes, send it to the first one only, which then saves a checkpoint; otherwise memory may have "
                f"run out, or /dev/shm ({_free_shared_memory()}). {CONTINUE}"
            )

    def _ended(self) -> list[str]:
        ended = [f"Ray's own {name}" for process, name in self._processes.items() if has_ended(process)]
        if self._address is not None and not _answers(self._address):
            ended.append(f"the Ray cluster's head at {self._address}")
        return ended


def has_ended(process: psutil.Process) -> bool:
    """Return whether a process has ended; zombies count as ended."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def processes_of_sessions(leaders: Collection[int]) -> list[psutil.Process]:
    """Return all processes in the sessions with these leaders."""
    members = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError):
            if os.getsid(process.pid) in leaders and not has_ended(process):
                members.append(process)
    return members


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill processes, and return when they are gone, or after `_GONE_S`."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    # psutil.wait_procs counts a zombie that nobody reaps, as in some containers, as alive.
    deadline = time.monotonic() + _GONE_S
    while not all(has_ended(process) for process in processes) and time.monotonic() < deadline:
        time.sleep(0.01)


def _answers(address: str) -> bool:
    """Return whether something listens at `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
    except OSError:
        return False
    return True


def _free_shared_memory() -> str:
    try:
        return f"{psutil.disk_usage('/dev/shm').free / 2**30:.1f} GiB free"
    except OSError:
        return "which cannot be read"


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for Ray's runtime environment: no secrets, because everyone in the cluster can read it."""
    return {name: value for name, value in _with_prefix(environ).items() if not is_secret_name(name)}


def forwarded_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the secrets, which are passed as arguments of actors."""
    return {name: value for name, value in _with_prefix(environ).items() if is_secret_name(name)}


def _with_prefix(environ: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environ.items() if name.startswith(_PREFIXES)}
