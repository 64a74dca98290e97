"""Two runs in one directory: the second is refused, since each would remove the other's checkpoints."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nemo_opd.checkpoint.run_directory import LOCK_NAME, RunLock
from nemo_opd.errors import ConfigError

pytestmark = pytest.mark.world

HOLD = """
import sys
from pathlib import Path
from nemo_opd.checkpoint.run_directory import RunLock
lock = RunLock(Path(sys.argv[1]))
print("held", flush=True)
sys.stdin.read()
"""


def held_by_another(folder: Path) -> "subprocess.Popen[str]":
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_with_the_pid_and_host_of_the_first_until_that_one_is_killed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    holder = held_by_another(folder)
    by = rf"in use by process {holder.pid} on host {socket.gethostname()}, since \d{{4}}-"
    with pytest.raises(ConfigError, match=by):
        RunLock(folder)
    holder.kill()
    holder.communicate()
    with RunLock(folder) as lock:
        assert lock.path.read_text().startswith(f"process {os.getpid()} on host ")
    assert list(folder.iterdir()) == []


def test_a_file_that_its_holder_removed_is_not_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: two runs hold locks on two files with the same name."""
    (tmp_path / LOCK_NAME).touch()
    is_there, looks = RunLock._is_there, []

    def leave_first(lock: RunLock, file: object) -> bool:
        if not looks:
            lock.path.unlink()
        looks.append(is_there(lock, file))  # type: ignore[arg-type]
        return looks[-1]

    monkeypatch.setattr(RunLock, "_is_there", leave_first)
    with RunLock(tmp_path):
        assert looks == [False, True]
        with pytest.raises(ConfigError, match="in use"):
            RunLock(tmp_path)


def test_a_file_system_without_locks_is_reported_and_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(95, "Operation not supported")

    monkeypatch.setattr("nemo_opd.checkpoint.run_directory.fcntl.flock", refuse)
    with RunLock(tmp_path):
        assert "cannot be locked" in caplog.text
