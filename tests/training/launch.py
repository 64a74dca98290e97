"""Runs of the example script as a user starts them, and checks for leftovers on the machine.

Other runs may share the machine, so a run's processes are recognized by an environment variable that they inherit.
"""

import os
import re
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from nemo_opd.logging.loggers import read
from nemo_opd.training.off_policy import distil
from tests.composition import compose
from tests.processes import Command
from tests.segments import left_of, mapped_by
from tests.waiting import CLEAN_S, ENOUGH_S, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "examples" / "run_off_policy_distillation.py"
MARK = "NEMO_OPD_TEST_RUN"
RAY_GIVES_UP_S = 60.0
"""Ray ends a driver after losing its cluster for this long."""


@dataclass
class Run:
    """A started run, with the processes, segments and folders seen so far."""

    process: Command
    mark: str
    output_dir: Path
    segments: set[int] = field(default_factory=set)
    """Inodes of all shared-memory segments that these processes mapped."""
    ray_folders: set[Path] = field(default_factory=set)
    seen: dict[int, str] = field(default_factory=dict)
    """Command lines of all processes seen alive, by process id."""
    sessions: set[int] = field(default_factory=set)
    """Session ids of these processes: Ray's agents overwrite the environment variable with their titles."""

    @property
    def output(self) -> str:
        return self.process.output()

    @property
    def metrics(self) -> list[dict[str, float]]:
        return read(self.output_dir / "metrics.jsonl")

    @property
    def last_line(self) -> str:
        return self.output.strip().splitlines()[-1]

    @property
    def checkpoints(self) -> list[str]:
        return sorted(entry.name for entry in (self.output_dir / "checkpoints").iterdir())

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of the run, the driver included."""
        living = []
        for process in psutil.process_iter():
            try:
                if not self._owns(process) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                self.seen[process.pid] = command = " ".join(process.cmdline()).strip()
                self.sessions.add(os.getsid(process.pid))
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
            living.append(process)
            self.segments |= mapped_by(process.pid)
            self.ray_folders |= {Path(name) for name in re.findall(r"/tmp/opd_[^/\s]+", command)}
        return living

    def _owns(self, process: psutil.Process) -> bool:
        return process.environ().get(MARK) == self.mark or os.getsid(process.pid) in self.sessions

    def workers(self) -> list[psutil.Process]:
        """Return the Ray actors, which have their class as process title."""
        return [process for process in self.processes() if "RankActor" in self.seen[process.pid]]

    def wait_for_step(self, step: int) -> None:
        """Wait until metrics.jsonl has the record of a step; kill a run that does not get there."""
        file = self.output_dir / "metrics.jsonl"

        self._wait_until(
            lambda: file.exists() and f'{{"step": {step},' in file.read_text(encoding="utf-8"), f"step {step}"
        )

    def wait_for_workers(self) -> None:
        """Wait until the first worker has started, which then loads its model."""
        self._wait_until(lambda: bool(self.workers()), "first worker")

    def wait_for_hang(self) -> int:
        """Wait until the student of faulty_workers.py hangs; return its process id."""
        file = hanging(self.output_dir, self.mark)
        self._wait_until(lambda: file.exists() and bool(file.read_text()), "hanging student")
        return int(file.read_text())

    def release(self) -> None:
        """Let the hanging student continue."""
        hanging(self.output_dir, self.mark).unlink()

    def _wait_until(self, condition: Callable[[], bool], event: str) -> None:
        def has_happened() -> bool:
            if condition():
                return True
            assert self.process.returncode is None, f"ended with {self.process.returncode}: {self.output}"
            return False

        try:
            wait_until(has_happened, event, every_s=0.01)
        except AssertionError:
            if self.process.returncode is None:
                self.kill()
            raise

    def end(self) -> int:
        """Wait for the driver to end by itself; return its exit status."""
        try:
            self.process.wait(ENOUGH_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert self.process.returncode is not None
        return self.process.returncode

    def kill(self) -> None:
        """Send SIGKILL to the driver's process group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def interrupt(self) -> None:
        """Send SIGINT to every process of the group, as Ctrl-C in a terminal does."""
        os.killpg(self.process.pid, signal.SIGINT)

    def leftovers(self, *, is_killed: bool = False, within_s: float = CLEAN_S) -> list[str]:
        """Return processes, shared memory, folders and half-written files that remain after `within_s`.

        After a kill, the next run removes the folders, and the tracker of the forked commands the semaphores.
        """
        deadline = time.monotonic() + within_s
        while (remaining := self._leftovers(is_killed)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return remaining

    def _leftovers(self, is_killed: bool) -> list[str]:
        remaining = [f"process {process.pid}: {self.seen[process.pid]}" for process in self.processes()]
        remaining += [name for name in left_of(self.segments) if not (is_killed and "/sem.mp-" in name)]
        if not is_killed:
            remaining += [str(folder) for folder in self.ray_folders if folder.exists()]
            remaining += [str(path) for path in self.output_dir.rglob("*incomplete*")]
        return remaining


def assert_a_signal_to_all_ends(run: Run) -> None:
    """Bug: the driver waits for Ray, which has ended with the workers, and Ray ends the driver only after a minute."""
    for process in run.processes():
        process.terminate()
    begin = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - begin < RAY_GIVES_UP_S, run.output
    assert run.last_line.endswith("run.resume=auto continues from the last checkpoint"), run.output
    assert "Failed to connect to GCS" not in run.output
    assert run.leftovers() == []


def hanging(output_dir: Path, mark: str) -> Path:
    """Return the file that exists as long as the run's student hangs."""
    return output_dir / f"hanging_{mark}"


def run_here(output_dir: Path, overrides: Sequence[str]) -> Path:
    """Run in this process, which is faster; return the output directory."""
    distil(compose(*overrides, "cluster.launcher=local", f"run.output_dir={output_dir}"))
    return output_dir


def start(
    output_dir: Path,
    overrides: Sequence[str],
    *,
    script: Path = SCRIPT,
    arguments: Sequence[str] = (),
) -> Run:
    """Start a run in its own process group, as a shell does, but forked from a process that has imported everything.

    The demo runs without its benchmark.
    """
    if script == SCRIPT and not arguments:
        overrides = ["evaluation=null", *overrides]
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    command_line = [*arguments, *overrides, f"run.output_dir={output_dir}"]
    process = Command(script, command_line, environment, output_dir.parent)
    # The kernel shows the environment of the process that was forked, without the mark: its session identifies it.
    return Run(process, mark, output_dir, sessions={process.pid})
