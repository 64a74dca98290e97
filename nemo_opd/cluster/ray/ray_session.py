"""A Ray session, either started on this machine for the run or joined on a running cluster."""

import errno
import fcntl
import logging
import os
import secrets
import shutil
import signal
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RayError

from nemo_opd.cluster.ray.services import SERVICE_NAMES, Services, end, forwarded, in_new_session, processes_of_sessions
from nemo_opd.errors import ClusterError

LOOPBACK = "127.0.0.1"
MODE, TOKEN, TOKEN_PATH = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
VARIABLES = (MODE, TOKEN, TOKEN_PATH)
LOCK = "owner.lock"
STARTS = 2
"""Attempts to start a local cluster: Ray gives up after half a minute, too early on a very busy machine."""
_ANSWER_S = 60.0
"""Limit of the wait for a running cluster's answer."""
_PREFIX = "opd_"
_FOR_RAY = "ray"
_RECREATED_S = 60.0
"""Minimum age of a recreated folder that is no longer in use."""
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
        self.services = Services(address=ray.get_runtime_context().gcs_address)

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
        with _keep_signal_handlers(), _private_start(), in_new_session():
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
        self.services = Services([process for process in started if process.name() in SERVICE_NAMES])

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


def probe(address: str) -> None:
    """Check a cluster's address before `ray.init`, which would retry for a long time.

    Raises OSError if nothing listens at `host:port`, AuthenticationError if the cluster refuses this process's token,
    and RayError if it is not a Ray cluster.
    """
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()
        if "://" not in address:
            # `ray.init` would retry a refused token for 20 seconds and then report that nothing answers.
            GcsClient(address=address).get_all_node_info(timeout=_ANSWER_S)


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


@contextmanager
def _private_start() -> Iterator[None]:
    """Make a cluster that `ray.init` starts in this context listen on loopback only and require a token.

    RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH may provide the token. Otherwise a new token is held only in the memory of the
    cluster's processes, because Ray's default is a file in the home folder that others may read. RAY_AUTH_MODE=disabled
    is respected.
    """
    environment = {name: os.environ.get(name) for name in VARIABLES}
    is_cluster_enabled = ray_constants.ENABLE_RAY_CLUSTER
    if not environment[TOKEN] and not environment[TOKEN_PATH]:
        os.environ[TOKEN] = secrets.token_hex(32)
    try:
        # Ray replaces loopback by the machine's address unless multi-machine clusters are disabled. It has no other
        # setting that binds its ports to one address.
        ray_constants.ENABLE_RAY_CLUSTER = False
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = is_cluster_enabled
        # Ray's processes have the token by now; other child processes do not need it.
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def forget() -> None:
    """Make Ray read mode and token again for the next cluster. Call it after `ray.shutdown`."""
    # In this order, because threads that are still ending would otherwise look for a deleted token.
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


class SessionFolder:
    """A new folder under /tmp, removed by `close`, or by this user's next run if its owner was killed.

    The owner holds a lock on a file in it, which the kernel releases when the process ends.
    """

    def __init__(self, root: Path = Path("/tmp")) -> None:
        """Create the folder in /tmp instead of `$TMPDIR`, because paths of sockets are limited to 107 bytes.

        Raises ClusterError if it cannot be created.
        """
        remove_abandoned(root)
        try:
            self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=root))
        except OSError as error:
            raise ClusterError(
                f"Ray needs a folder for its sockets under {root}, which cannot be created ({error.strerror}); make "
                f"{root} writable, or start Ray elsewhere with `ray start --head` and give cluster.address"
            ) from error
        temporary = self.path / f"{LOCK}.new"
        self._lock = temporary.open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        # Rename it only after locking it: other runs treat an unlocked file as abandoned.
        temporary.rename(self.path / LOCK)

    @property
    def for_ray(self) -> Path:
        """Subfolder for Ray, which makes it readable for all users; the session folder itself stays private."""
        return self.path / _FOR_RAY

    def processes(self) -> list[psutil.Process]:
        """Return this process's children that have the folder on their command line, and their descendants."""
        processes = []
        for child in psutil.Process().children():
            with suppress(psutil.NoSuchProcess):
                if any(str(self.path) in argument for argument in child.cmdline()):
                    processes += [child, *child.children(recursive=True)]
        return processes

    def close(self) -> None:
        """Remove the folder; may be called again."""
        _remove(self.path)
        self._lock.close()


def remove_abandoned(root: Path) -> None:
    """Remove this user's session folders whose owners are gone.

    Anybody may create names under `root`, so links are not followed.
    """
    for folder in root.glob(f"{_PREFIX}*"):
        with suppress(OSError), _opened(folder) as descriptor:
            if LOCK in os.listdir(descriptor):
                with open(LOCK, "r+", opener=partial(_open_inside, descriptor)) as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    _remove(folder)
            elif _is_recreated(descriptor):
                shutil.rmtree(_FOR_RAY, ignore_errors=True, dir_fd=descriptor)
                folder.rmdir()


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    """Yield a descriptor of a folder. Raises OSError if it is a link or another user's."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        if os.fstat(descriptor).st_uid != os.geteuid():
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), str(folder))
        yield descriptor
    finally:
        os.close(descriptor)


def _open_inside(folder: int, name: str, flags: int) -> int:
    return os.open(name, flags | os.O_NOFOLLOW, dir_fd=folder)


def _is_recreated(folder: int) -> bool:
    """Return whether an orphaned Ray process has recreated its folder after the session was removed."""
    if os.listdir(folder) != [_FOR_RAY] or time.time() - os.fstat(folder).st_mtime <= _RECREATED_S:
        return False
    for_ray = _open_inside(folder, _FOR_RAY, os.O_RDONLY | os.O_DIRECTORY)
    try:
        return {name.partition("_")[0] for name in os.listdir(for_ray)} == {"session"}
    finally:
        os.close(for_ray)


def _remove(folder: Path) -> None:
    """Remove a session folder, its lock last; if an ending process recreates files, the next run removes them."""
    with suppress(OSError), _opened(folder) as descriptor:
        for name in {*os.listdir(descriptor)} - {LOCK}:
            shutil.rmtree(name, ignore_errors=True, dir_fd=descriptor)
        if os.listdir(descriptor) == [LOCK]:
            os.unlink(LOCK, dir_fd=descriptor)
            folder.rmdir()
