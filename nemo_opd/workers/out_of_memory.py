"""Out-of-memory errors and peak memory. Imports no model code: every rank imports this file before its worker."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from nemo_opd.errors import ClusterError, OPDError

_UNITS = {unit: 2 ** (10 * i) for i, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))}
_REQUESTED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+) (bytes|[KMGTPE]iB)", re.IGNORECASE)
_FREE = re.compile(r"of which ([\d.]+) (bytes|[KMGTPE]iB) is free")
_SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "unable to allocate")
"""Substrings of out-of-memory messages in plain RuntimeErrors."""


@dataclass(frozen=True, slots=True)
class Task:
    """Work that may run out of memory."""

    name: str
    """Noun phrase that follows "in" in the message."""
    knobs: tuple[str, ...]
    """Settings changes that lower its memory, cheapest first."""


@dataclass(frozen=True, slots=True)
class FrozenTasks:
    """Tasks of a frozen model."""

    loading: Task
    reading: Task
    answers: Task


@contextmanager
def needs_memory(task: Task) -> Iterator[None]:
    """Turn an out-of-memory error of device or host into a one-line ClusterError; pass other errors through.

    The message names the task, the requested and the free memory, and settings that help. With nested tasks, it
    names the innermost.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise ClusterError(_explain(task, error)) from error


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, OPDError):  # already explained to the user
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign.lower() in text for sign in _SIGNS)


def _explain(task: Task, error: BaseException) -> str:
    text = str(error)
    on_device = isinstance(error, torch.OutOfMemoryError) or any(name in text for name in ("CUDA", "CUBLAS", "NCCL"))
    kind = "GPU memory" if on_device else "main memory"
    requested = _size_in(_REQUESTED, text)
    failure = "an allocation failed" if requested is None else f"cannot allocate {_amount(requested)}"
    free: float | None = psutil.virtual_memory().available
    if on_device:
        free = _size_in(_FREE, text)
        if free is None and torch.cuda.is_available():
            free = torch.cuda.mem_get_info()[0]
    available = "" if free is None else f", {_amount(free)} free"
    return f"out of {kind} in {task.name}: {failure}{available}; {'; or '.join(task.knobs)}"


def _size_in(pattern: re.Pattern[str], text: str) -> float | None:
    match = pattern.search(text)
    return None if match is None else float(match[1]) * _UNITS[match[2]]


def _amount(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"


def peak_memory_gb(device: str) -> float:
    """Return peak GPU memory in GiB since the last call, or on CPU the process's current memory."""
    if device == "cuda":
        peak = torch.cuda.max_memory_allocated() / 2**30
        torch.cuda.reset_peak_memory_stats()
        return peak
    return psutil.Process().memory_info().rss / 2**30


_SHORTER = "lower train.micro_batch_size or train.max_length"
_CHECKPOINTING = "set student.activation_checkpointing=true"
_OFFLOAD_TEACHERS = "set offload=true for the teachers"
_OFFLOAD_STUDENT = "set student.offload=true"
_TP_OF_STUDENT = "raise student.parallelism.tp, or use more ranks"
_TP_OF_MODEL = "raise parallelism.tp, or use more ranks"
_SMALLER_BATCH = "lower train.global_batch_size"
LOADING_STUDENT = Task("loading the student", (_OFFLOAD_TEACHERS, _TP_OF_STUDENT))
FORWARD = Task("the student's forward pass", (_SHORTER, _CHECKPOINTING, _OFFLOAD_TEACHERS, _TP_OF_STUDENT))
LOSS = Task("a chunk of a loss", (_SHORTER, _OFFLOAD_TEACHERS, _CHECKPOINTING, _TP_OF_STUDENT))
BACKWARD = Task("the student's backward pass", (_SHORTER, _CHECKPOINTING, _OFFLOAD_TEACHERS, _TP_OF_STUDENT))
ARRIVALS = Task(
    "allocating buffers for the output of teachers on other nodes",
    (f"{_SMALLER_BATCH} or train.max_length", "lower cluster.prefetch", _OFFLOAD_STUDENT),
)
ROLLOUT = Task(
    "the student's rollouts",
    ("lower rollout.batch_size", "lower rollout.max_new_tokens", _OFFLOAD_TEACHERS, "rollout=server"),
)
OPTIMIZER = Task("the optimizer's step", (_OFFLOAD_TEACHERS, _TP_OF_STUDENT))
EVALUATED_TASKS = FrozenTasks(
    Task("loading the model", (_TP_OF_MODEL,)),
    Task("reading the questions of a benchmark", ("lower benchmark_length", _TP_OF_MODEL)),
    Task("the answers to the questions", ("lower rollout.batch_size or max_new_tokens", _TP_OF_MODEL)),
)
"""Tasks of a model that is evaluated outside a run."""


def teacher_tasks(key: str, name: str) -> FrozenTasks:
    """Return the tasks of a teacher; key: its key in the settings, such as `teachers.0`."""
    tp = f"raise {key}.parallelism.tp"
    more_ranks = f"{tp}, or use more ranks"
    return FrozenTasks(
        Task(f"loading the teacher {name}", (f"set {key}.offload=true", _OFFLOAD_STUDENT, more_ranks)),
        Task(f"the forward pass of the teacher {name}", (_SHORTER, _OFFLOAD_STUDENT, more_ranks)),
        Task(
            f"the answers of the teacher {name} to the questions",
            (
                "lower evaluation.teacher_batch_size or evaluation.max_new_tokens",
                _OFFLOAD_STUDENT,
                f"{tp}, the only way to shard weights during generation",
                "set evaluation.teachers=false",
            ),
        ),
    )


def averaging(key: str, name: str) -> Task:
    """Return the task of creating a teacher's average; key: its key in the settings, such as `teachers.0`."""
    return Task(
        f"creating the average of the teacher {name} ({key}.weights=ema)",
        (f"set {key}.offload=true", _OFFLOAD_TEACHERS, _OFFLOAD_STUDENT, _TP_OF_STUDENT),
    )


def handoff_buffer(name: str) -> Task:
    return Task(
        f"allocating the buffer for the output of the teacher {name}",
        ("use handoff.type=hidden_states", f"{_SMALLER_BATCH} or train.max_length", _OFFLOAD_STUDENT),
    )
