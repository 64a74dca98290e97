"""The runs of `quality.py`: each is the example's own command, in a folder of its own that says whether it is done."""

import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from queue import SimpleQueue

from nemo_opd.files import write_atomically
from nemo_opd.logging.loggers import read

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "run_off_policy_distillation.py"
OUTCOME = "outcome.json"
"""Written last into a run's folder, so a folder with it holds a whole run."""


@dataclass(frozen=True)
class Run:
    setting: str
    seed: int
    overrides: tuple[str, ...]
    """All that the run is, beside its folder."""
    folder: Path

    @property
    def log(self) -> Path:
        """What the command printed."""
        return self.folder.with_name(f"{self.folder.name}.log")


@dataclass(frozen=True)
class Score:
    bits_per_byte: float
    accuracy: float
    """Of validation."""


@dataclass(frozen=True)
class Outcome:
    setting: str
    seed: int
    overrides: tuple[str, ...]
    start: Score
    end: Score
    steps: int
    wall_s: float
    """The whole command, start-up and report included, with what else the machine did then."""
    hardware: str
    commit: str
    """When the run was started."""


class RunError(Exception):
    """A command that did not end well."""


def finished(run: Run) -> Outcome | None:
    """What a whole run of just these overrides left in the folder; None where there is none."""
    file = run.folder / OUTCOME
    if not file.exists():
        return None
    record = json.loads(file.read_text(encoding="utf-8"))
    scores = {name: Score(**record.pop(name)) for name in ("start", "end")}
    outcome = Outcome(**{**record, **scores, "overrides": tuple(record["overrides"])})
    return outcome if outcome.overrides == run.overrides else None


class Runner:
    """Starts runs, several at a time and each on a core of its own, and ends them if it is interrupted itself."""

    def __init__(self, num_jobs: int, hardware: str, commit: Callable[[], str]) -> None:
        self._num_jobs = num_jobs
        self._hardware = hardware
        self._commit = commit
        self._processes: set[subprocess.Popen[bytes]] = set()
        self._stopped = threading.Event()

    def run(self, runs: Sequence[Run], done: Callable[[Run, Outcome | RunError], None]) -> None:
        """Runs them in this order, and calls `done` for each as it ends, in the caller's thread."""
        cores: SimpleQueue[int] = SimpleQueue()
        for i in range(self._num_jobs):
            cores.put(i)
        with ThreadPoolExecutor(self._num_jobs, initializer=lambda: pin(cores.get())) as pool:
            futures = {pool.submit(self._run_once, run): run for run in runs}
            try:
                for future in as_completed(futures):
                    error = future.exception()
                    if error is not None and not isinstance(error, RunError):
                        raise error
                    done(futures[future], error if error is not None else future.result())
            except BaseException:
                self._stop()
                pool.shutdown(cancel_futures=True)
                raise

    def _run_once(self, run: Run) -> Outcome:
        if self._stopped.is_set():
            raise RunError("not started")
        if run.folder.exists():
            shutil.rmtree(run.folder)
        commit = self._commit()
        began = time.perf_counter()
        self._execute(run)
        wall_s = time.perf_counter() - began
        start, end, steps = scores(run.folder)
        outcome = Outcome(run.setting, run.seed, run.overrides, start, end, steps, wall_s, self._hardware, commit)
        write_atomically(run.folder / OUTCOME, (json.dumps(asdict(outcome), indent=1) + "\n").encode())
        shutil.rmtree(run.folder / "checkpoints", ignore_errors=True)
        return outcome

    def _execute(self, run: Run) -> None:
        command = [sys.executable, str(EXAMPLE), *run.overrides, f"run.output_dir={run.folder}"]
        run.log.parent.mkdir(parents=True, exist_ok=True)
        with run.log.open("wb") as log:
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT)
            self._processes.add(process)
            status = process.wait()
            self._processes.discard(process)
        if status:
            last = run.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise RunError(f"exit status {status}: {''.join(last)}")

    def _stop(self) -> None:
        self._stopped.set()
        for process in list(self._processes):
            process.terminate()


def pin(job: int) -> None:
    """Keeps this thread, and the processes it starts, on one core, where the system can do so.

    A run takes as many threads as it may use cores; two runs with all cores each would slow each other down.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[job % len(cores)]})


def scores(folder: Path) -> tuple[Score, Score, int]:
    """The first and the last validation of a run, and its steps."""
    records = read(folder / "metrics.jsonl")
    validated = [
        Score(record["val/bits_per_byte"], record["val/accuracy"]) for record in records if "val/accuracy" in record
    ]
    return validated[0], validated[-1], int(records[-1]["step"])
