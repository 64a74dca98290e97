"""Runs of the example script as a user starts them, and a look at everything they leave on the machine.

Other runs may share the machine, so whatever belongs to a run is told by a variable that its processes inherit.
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
"""Ray ends a driver of which it has lost the cluster for so long."""


@dataclass
class Run:
    """A started run and what has been seen of it."""

    process: Command
    mark: str
    output_dir: Path
    segments: set[int] = field(default_factory=set)
    """Inodes of all segments of shared memory that these processes were found to map."""
    ray_folders: set[Path] = field(default_factory=set)
    seen: dict[int, str] = field(default_factory=dict)
    """Command lines by process id, of all processes that were found alive."""
    sessions: set[int] = field(default_factory=set)
    """Session ids of these processes: Ray's agents write their titles over the variable that would tell them."""

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
        """All living processes of the run, the driver included."""
        found = []
        for process in psutil.process_iter():
            try:
                if not self._owns(process) or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                self.seen[process.pid] = command = " ".join(process.cmdline()).strip()
                self.sessions.add(os.getsid(process.pid))
            except (psutil.NoSuchProcess, psutil.AccessDenied, ProcessLookupError):
                continue
            found.append(process)
            self.segments |= mapped_by(process.pid)
            self.ray_folders |= {Path(name) for name in re.findall(r"/tmp/opd_[^/\s]+", command)}
        return found

    def _owns(self, process: psutil.Process) -> bool:
        return process.environ().get(MARK) == self.mark or os.getsid(process.pid) in self.sessions

    def workers(self) -> list[psutil.Process]:
        """The Ray actors, which the kernel knows by their class."""
        return [process for process in self.processes() if "RankActor" in self.seen[process.pid]]

    def wait_for_step(self, step: int) -> None:
        """Returns as soon as metrics.jsonl has the record of a step; a run that does not get there is killed."""
        file = self.output_dir / "metrics.jsonl"

        self._wait_until(
            lambda: file.exists() and f'{{"step": {step},' in file.read_text(encoding="utf-8"), f"step {step}"
        )

    def wait_for_workers(self) -> None:
        """Returns as soon as the first worker has started, which then loads its model."""
        self._wait_until(lambda: bool(self.workers()), "first worker")

    def wait_for_hang(self) -> int:
        """Returns as soon as the student of faulty_workers.py hangs: its process id."""
        file = hanging(self.output_dir, self.mark)
        self._wait_until(lambda: file.exists() and bool(file.read_text()), "hanging student")
        return int(file.read_text())

    def release(self) -> None:
        """What hangs goes on."""
        hanging(self.output_dir, self.mark).unlink()

    def _wait_until(self, condition: Callable[[], bool], what: str) -> None:
        def is_so() -> bool:
            if condition():
                return True
            assert self.process.returncode is None, f"ended with {self.process.returncode}: {self.output}"
            return False

        try:
            wait_until(is_so, what, every_s=0.01)
        except AssertionError:
            if self.process.returncode is None:
                self.kill()
            raise

    def end(self) -> int:
        """Wait for the driver to end by itself: its exit status."""
        try:
            self.process.wait(ENOUGH_S)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        assert self.process.returncode is not None
        return self.process.returncode

    def kill(self) -> None:
        """SIGKILL to the driver and whatever is in its process group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def interrupt(self) -> None:
        """What Ctrl-C in a terminal does: SIGINT to every process of the foreground group."""
        os.killpg(self.process.pid, signal.SIGINT)

    def leftovers(self, *, is_killed: bool = False, within_s: float = CLEAN_S) -> list[str]:
        """What is still there once processes had time to end: processes, shared memory, folders, half-written files.

        is_killed: folders are for the next run to remove, and semaphores for the tracker that forked commands share.
        """
        deadline = time.monotonic() + within_s
        while (left := self._leftovers(is_killed)) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _leftovers(self, is_killed: bool) -> list[str]:
        left = [f"process {process.pid}: {self.seen[process.pid]}" for process in self.processes()]
        left += [name for name in left_of(self.segments) if not (is_killed and "/sem.mp-" in name)]
        if not is_killed:
            left += [str(folder) for folder in self.ray_folders if folder.exists()]
            left += [str(path) for path in self.output_dir.rglob("*incomplete*")]
        return left


def assert_a_signal_to_all_ends(run: Run) -> None:
    """Bug: waiting for Ray, which has ended with the workers, until Ray itself ends the driver after a minute."""
    for process in run.processes():
        process.terminate()
    begin = time.monotonic()
    assert run.end() == 1
    assert time.monotonic() - begin < RAY_GIVES_UP_S, run.output
    assert run.last_line.endswith("run.resume=auto continues from the last checkpoint"), run.output
    assert "Failed to connect to GCS" not in run.output
    assert run.leftovers() == []


def hanging(output_dir: Path, mark: str) -> Path:
    """A file that is there as long as the student of a run hangs."""
    return output_dir / f"hanging_{mark}"


def run_here(output_dir: Path, overrides: Sequence[str]) -> Path:
    """Run in this process, which is sooner done; return the output directory."""
    distil(compose(*overrides, "cluster.launcher=local", f"run.output_dir={output_dir}"))
    return output_dir


def start(
    output_dir: Path,
    overrides: Sequence[str],
    *,
    script: Path = SCRIPT,
    arguments: Sequence[str] = (),
) -> Run:
    """Start a run in a process group of its own, as a shell does, but forked from a process with its imports.

    The demo runs without its benchmark.
    """
    if script == SCRIPT and not arguments:
        overrides = ["evaluation=null", *overrides]
    mark = uuid.uuid4().hex
    environment = {**os.environ, MARK: mark, "COLUMNS": "200", "PYTHONPATH": str(ROOT)}
    given = [*arguments, *overrides, f"run.output_dir={output_dir}"]
    process = Command(script, given, environment, output_dir.parent)
    # The kernel shows the variables of the process that it is forked from.
    return Run(process, mark, output_dir, sessions={process.pid})
