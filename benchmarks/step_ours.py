"""Our own side of `step.py`: a run's session, stepped one optimizer step at a time."""

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import psutil
import torch
import yaml
from omegaconf import OmegaConf
from step_flops import StepWork

from nemo_opd.aggregation import build_objective
from nemo_opd.cluster.placement import num_cores
from nemo_opd.config import RunConfig
from nemo_opd.config.composition import from_omegaconf
from nemo_opd.logging.metrics import Timer
from nemo_opd.losses.arguments import chunk_units
from nemo_opd.preflight.flops import Flops
from nemo_opd.preflight.memory import Memory
from nemo_opd.preflight.plan import Plan, preflight
from nemo_opd.training.batches import Lookahead
from nemo_opd.training.models import ScoredBatch
from nemo_opd.training.off_policy import train_step
from nemo_opd.training.session import Session
from nemo_opd.types import Batch

GIB = 2**30
PERIOD_MS = 200
"""Milliseconds between two readings of a GPU's memory."""
LIBRARIES = "import psutil, ray, nemo_opd.workers.student_worker; print(psutil.Process().memory_info().rss)"


def configured(base: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    """Settings with overrides as on a run's command line, `teachers.0.dtype=float32`. Raises ConfigError."""
    config = OmegaConf.create(base)
    for override in overrides:
        key, _, value = override.partition("=")
        OmegaConf.update(config, key, yaml.safe_load(value), force_add=True)
    return from_omegaconf(config, RunConfig)


@dataclass(frozen=True)
class MemoryFound:
    what: str
    measured_gib: float
    estimated_gib: float


class Watched:
    """A lookahead that remembers what it gave."""

    def __init__(self, lookahead: Lookahead) -> None:
        self._lookahead = lookahead
        self.batches: list[Batch] = []

    @property
    def epoch(self) -> int:
        return self._lookahead.epoch

    def next(self, timer: Timer) -> ScoredBatch:
        scored = self._lookahead.next(timer)
        self.batches.append(scored.batch)
        return scored


class Ours:
    """The real run, from preflight on, without validation and checkpoints."""

    def __init__(self, config: RunConfig) -> None:
        """Returns when all models are loaded. Raises an OPDError."""
        self.plan: Plan = preflight(config)
        self.config = self.plan.config
        self.records: list[dict[str, float]] = []
        """Of each step, as metrics.jsonl has them."""
        with ExitStack() as stack:
            if self.plan.device == "cuda":
                self._most_on_gpu = stack.enter_context(watching_gpus())
            self._session = stack.enter_context(Session(self.plan))
            self._watched = Watched(self._session.lookahead)
            self._session.lookahead = self._watched  # type: ignore[assignment]
            self._steps = self._session.steps()
            self._stack = stack.pop_all()

    def step(self) -> float:
        """Seconds of one optimizer step. Raises KeyboardInterrupt where someone asked to stop."""
        if next(self._steps, None) is None:
            raise KeyboardInterrupt
        record = train_step(self._session)
        self.records.append(record)
        return record["perf/step_s"]

    def profile(self, trace: Path) -> None:
        """Write a Chrome trace of one step: kernels, and operations with their shapes."""
        with torch.profiler.profile(record_shapes=True) as profiler:
            self.step()
        profiler.export_chrome_trace(str(trace))

    def validate(self) -> None:
        """Validate on the batch of the last step."""
        self._session.models.evaluate(self._watched.batches[-1])

    @property
    def work(self) -> list[StepWork]:
        """Of each step."""
        parts = build_objective(
            self.config,
            [teacher.projection for teacher in self.plan.teachers],
            student_vocab_size=self.plan.student_vocab_size,
            teacher_vocab_sizes=[teacher.vocab_size for teacher in self.plan.teachers],
        ).parts
        return [
            StepWork(
                tuple(batch.student.lengths.tolist()),
                tuple(tuple(teacher.tokens.lengths.tolist()) for teacher in batch.teachers),
                tuple(
                    round(sum(part.loss.num_units(*part.rows(batch)) for part in parts if part.teacher == i))
                    + self._chain_rows(batch, i)
                    for i in range(len(batch.teachers))
                ),
            )
            for batch in self._watched.batches
        ]

    def _chain_rows(self, batch: Batch, teacher: int) -> int:
        """Count the further rows of a teacher's head that byte_prefix reads in chunks of one student token."""
        chunks = batch.teachers[teacher].chunks
        if self.config.term(teacher).type != "byte_prefix" or chunks is None:
            return 0
        units = chunk_units(chunks.student, chunks.teacher)
        return int(((units.student_lengths == 1) * (units.teacher_lengths - 1)).sum())

    def flops(self, work: StepWork) -> dict[str, Flops]:
        sizes = self.plan.utilization
        names = [teacher.name for teacher in self.config.active_teachers]
        return work.flops(sizes.student, dict(zip(names, sizes.teachers, strict=True)))

    @property
    def num_devices(self) -> int:
        return len(self.plan.placement.devices)

    @property
    def threads(self) -> int:
        """Of each worker."""
        return self.plan.placement.num_threads(num_cores()) if self.plan.device == "cpu" else 1

    def memory(self) -> list[MemoryFound]:
        """What was held against what was estimated; to be called while the workers are there."""
        memories = self.plan.memory.memories
        if self.plan.device == "cuda":
            whole = MemoryFound("a whole GPU, all processes", self._most_on_gpu() / GIB, memories[0].peak / GIB)
            if not worker_processes():  # with cluster.launcher=local the teachers' tensors are in the student's process
                return [whole]
            student = max(record["perf/peak_memory_gb"] for record in self.records)
            return [
                MemoryFound("student's tensors on a GPU, peak", student, of_owner(memories[0], "student") / GIB),
                whole,
            ]
        workers = worker_processes()
        if not workers:  # with cluster.launcher=local all is in this process
            return []
        libraries = int(subprocess.check_output([sys.executable, "-c", LIBRARIES])) * len(workers)
        peaks = sum(map(peak_of_process, workers))
        owners = {part.owner for part in memories[0].parts}
        estimated = self.plan.student_layout.size * sum(of_owner(memories[0], owner) for owner in owners)
        what = f"{len(workers)} workers, peaks of each added, without {libraries / GIB:.2f} GiB of libraries"
        return [MemoryFound(what, (peaks - libraries) / GIB, estimated / GIB)]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def of_owner(memory: Memory, owner: str) -> int:
    """The most that one process of a rank holds in tensors."""
    parts = [part for part in memory.parts if part.owner == owner and part.name != "CUDA"]
    phases = {phase for part in parts for phase in part.num_bytes}
    return max(sum(part.at(phase) for part in parts) for phase in phases)


def worker_processes() -> list[psutil.Process]:
    children = psutil.Process().children(recursive=True)
    return [child for child in children if "RankActor" in " ".join(child.cmdline())]


def peak_of_process(process: psutil.Process) -> int:
    """Most main memory held since it began; what it shares with others counts in each."""
    with open(f"/proc/{process.pid}/status", encoding="utf-8") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024


@contextmanager
def watching_gpus() -> Iterator[Callable[[], int]]:
    """Yield a function that returns the most bytes in use on a GPU so far, of all processes.

    Read all the time, as processes that take turns on a GPU give cached memory back at the end of theirs; by a single
    program of the driver, as one that starts for each reading takes a core from the step.
    """
    fields = ["--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    command = ["nvidia-smi", *fields, "-lms", str(PERIOD_MS)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        lines, most = program.stdout, int(program.stdout.readline())

        def watch() -> None:
            nonlocal most
            for line in lines:
                most = max(most, int(line))

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield lambda: most * 2**20
        finally:
            program.terminate()
            thread.join()
