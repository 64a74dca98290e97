"""A Ray session, either started on this machine for the run or joined on a running cluster."""

import logging
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray.exceptions import AuthenticationError, RayError

from nemo_opd.cluster.ray.environment import forwarded
from nemo_opd.cluster.ray.privacy import LOOPBACK, forget, private_start, require_token
from nemo_opd.cluster.ray.services import Services, end, in_new_session, processes_of_sessions
from nemo_opd.cluster.ray.session_folder import SessionFolder
from nemo_opd.errors import ClusterError

_OBJECT_STORE_BYTES = 200 * 2**20
"""Size of a local cluster's object store, for the ids, masks and handles of a few batches."""
_QUIET: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
_SYSTEM = {
    # Each actor gets a new process, so prestarted ones would only idle.
    "prestart_worker_first_driver": False,
    # By default Ray gives workers a lower priority than the machine's other processes.
    "worker_niceness": 0,
    # Records of calls are for a dashboard, which does not run here, and would grow without limit.
    "task_events_report_interval_ms": 0,
}
STARTS = 2
"""Attempts to start a local cluster: Ray gives up after half a minute, too early on a very busy machine."""


def probe(address: str) -> None:
    """Check a cluster's address before `ray.init`, which would retry for a long time.

    Raises OSError if nothing listens at `host:port`, AuthenticationError if the cluster refuses this process's token,
    and RayError if it is not a Ray cluster.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
        if "://" not in address:
            require_token(address)


@contextmanager
def _keep_signal_handlers() -> Iterator[None]:
    """Restore the SIGTERM handler, which Ray replaces by one that ends the process immediately.

    Raises KeyboardInterrupt if the signal arrives in this context.
    """
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit as exit_signal:  # raised by Ray's handler
        raise KeyboardInterrupt from exit_signal
    finally:
        signal.signal(signal.SIGTERM, handler)


class RaySession:
    """This process's connection to Ray, and Ray's own processes if this process has started them."""

    def __init__(self, address: str | None, *, num_cpus: int, num_gpus: int | None = None) -> None:
        """Join the cluster at `address`, or if that is None start one on this machine for `num_cpus` workers.

        num_gpus: number of this machine's GPUs for the workers, counted from the first; by default all. Raises
        ClusterError if Ray does not start or does not answer.
        """
        self.services = Services()
        self._is_connected = False
        self._folder: SessionFolder | None = None
        self._sessions: set[int] = set()
        """Session ids of Ray's processes, which also reveal the children that a killed process has just started."""
        try:
            if address:
                self._join(address)
            else:
                self._start(num_cpus, num_gpus)
        except BaseException:
            self.close()
            raise

    def _join(self, address: str) -> None:
        try:
            probe(address)
            self._is_connected = True
            with _keep_signal_handlers():
                ray.init(address=address, runtime_env={"env_vars": forwarded(os.environ)}, **_QUIET)
        except AuthenticationError as error:
            raise ClusterError(
                f"cluster.address={address}: the cluster requires a token that this process does not have; set "
                "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN_PATH to the file with the token that the cluster was started "
                "with"
            ) from error
        except (OSError, RuntimeError, ValueError, RayError) as error:
            raise ClusterError(
                f"cluster.address={address}: no Ray cluster answers there ({error}); start one with "
                "`ray start --head`, or leave the key out to run on this machine"
            ) from error
        self.services = Services.elsewhere()

    def _start(self, num_cpus: int, num_gpus: int | None) -> None:
        for start in range(1, STARTS + 1):
            try:
                self._start_once(num_cpus, num_gpus)
                return
            except ClusterError:
                raise
            except Exception as error:  # Ray raises plain Exceptions
                self.close()
                if start == STARTS:
                    raise ClusterError(
                        f"Ray did not start on this machine in {STARTS} attempts ({error}); free processors and "
                        "memory, start Ray with `ray start --head` and give cluster.address, or write "
                        "cluster.launcher=local"
                    ) from error

    def _start_once(self, num_cpus: int, num_gpus: int | None) -> None:
        self._folder = SessionFolder()
        self._is_connected = True
        with _keep_signal_handlers(), private_start(), in_new_session():
            ray.init(
                address="local",
                num_cpus=num_cpus,
                num_gpus=num_gpus,
                object_store_memory=_OBJECT_STORE_BYTES,
                include_dashboard=False,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(self._folder.for_ray),
                _system_config=_SYSTEM,
                **_QUIET,
            )
        started = self._folder.processes()
        self._sessions |= {process.pid for process in started}
        self.services = Services.among(started)

    def close(self) -> None:
        """Disconnect, which ends actors and placement groups, and end the cluster if it was started here."""
        started = self._folder.processes() if self._folder else []
        self._sessions |= {process.pid for process in started}
        try:
            if self._is_connected:
                ray.shutdown()
                forget()
        finally:
            end(started)
            end(processes_of_sessions(self._sessions))
            if self._folder:
                self._folder.close()
