"""Out of memory, told as what was being computed and what would help."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from nemo_opd.errors import ClusterError, OPDError

UNITS = {unit: 2 ** (10 * i) for i, unit in enumerate(("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))}
ASKED = re.compile(r"(?:tried to allocate|unable to allocate) ([\d.]+) (bytes|[KMGTPE]iB)", re.IGNORECASE)
FREE = re.compile(r"of which ([\d.]+) (bytes|[KMGTPE]iB) is free")
SIGNS = ("out of memory", "can't allocate memory", "CUBLAS_STATUS_ALLOC_FAILED", "unable to allocate")
"""In messages of errors that have no class of their own."""


@dataclass(frozen=True, slots=True)
class Task:
    """What a worker does that may need more memory than there is."""

    name: str
    """Read after "in"."""
    knobs: tuple[str, ...]
    """Changes of settings that make it smaller, the cheapest first."""


SHORTER = "lower train.micro_batch_size or train.max_length"
CHECKPOINTING = "set student.activation_checkpointing=true"
OFFLOAD_TEACHERS = "set offload=true for the teachers"
OFFLOAD_STUDENT = "set student.offload=true"
TP_OF_STUDENT = "raise student.parallelism.tp, or use more ranks"
SMALLER_BATCH = "lower train.global_batch_size"

LOADING_STUDENT = Task("loading the student", (OFFLOAD_TEACHERS, TP_OF_STUDENT))
FORWARD = Task("the student's forward pass", (SHORTER, CHECKPOINTING, OFFLOAD_TEACHERS, TP_OF_STUDENT))
LOSS = Task("a chunk of a loss", (SHORTER, OFFLOAD_TEACHERS, CHECKPOINTING, TP_OF_STUDENT))
BACKWARD = Task("the student's backward pass", (SHORTER, CHECKPOINTING, OFFLOAD_TEACHERS, TP_OF_STUDENT))
ARRIVALS = Task(
    "making room for the output of teachers on other nodes",
    (f"{SMALLER_BATCH} or train.max_length", "lower cluster.prefetch", OFFLOAD_STUDENT),
)
ROLLOUT = Task(
    "the student's rollouts",
    ("lower rollout.batch_size", "lower rollout.max_new_tokens", OFFLOAD_TEACHERS, "rollout=server"),
)
OPTIMIZER = Task("the optimizer's step", (OFFLOAD_TEACHERS, TP_OF_STUDENT))


def loading_teacher(key: str, name: str) -> Task:
    """key: `teachers.0`, as in the settings."""
    return Task(
        f"loading the teacher {name}",
        (f"set {key}.offload=true", OFFLOAD_STUDENT, f"raise {key}.parallelism.tp, or use more ranks"),
    )


def teacher_forward(key: str, name: str) -> Task:
    return Task(
        f"the forward pass of the teacher {name}",
        (SHORTER, OFFLOAD_STUDENT, f"raise {key}.parallelism.tp, or use more ranks"),
    )


def teacher_answers(key: str, name: str) -> Task:
    return Task(
        f"the answers of the teacher {name} to the questions",
        (
            "lower evaluation.teacher_batch_size or evaluation.max_new_tokens",
            OFFLOAD_STUDENT,
            f"raise {key}.parallelism.tp, since only that spreads weights while a model generates",
            "write evaluation.teachers=false",
        ),
    )


def handoff_buffer(name: str) -> Task:
    return Task(
        f"making the buffer for the output of the teacher {name}",
        ("use handoff.type=hidden_states", f"{SMALLER_BATCH} or train.max_length", OFFLOAD_STUDENT),
    )


@contextmanager
def needs_memory(task: Task) -> Iterator[None]:
    """`with needs_memory(FORWARD): …`: where memory runs out inside, on device or host, says so in one line.

    Raises ClusterError with the task, what was asked for, what is free, and which settings help. Of nested ones the
    innermost speaks; all other errors pass.
    """
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise ClusterError(explain(task, error)) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Our own errors have said already what they are about."""
    if isinstance(error, OPDError):
        return False
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    text = str(error).lower()
    return any(sign.lower() in text for sign in SIGNS)


def explain(task: Task, error: BaseException) -> str:
    text = str(error)
    on_device = isinstance(error, torch.OutOfMemoryError) or "CUDA" in text or "CUBLAS" in text or "NCCL" in text
    kind = "GPU memory" if on_device else "main memory"
    asked = size_in(ASKED, text)
    wanted = "more was asked for than there is" if asked is None else f"{shown(asked)} were asked for"
    free = free_bytes(on_device, text)
    there = "" if free is None else f", {shown(free)} are free"
    return f"out of {kind} in {task.name}: {wanted}{there}; {'; or '.join(task.knobs)}"


def free_bytes(on_device: bool, text: str) -> float | None:
    if not on_device:
        return float(psutil.virtual_memory().available)
    told = size_in(FREE, text)
    if told is not None or not torch.cuda.is_available():
        return told
    return float(torch.cuda.mem_get_info()[0])


def size_in(pattern: re.Pattern[str], text: str) -> float | None:
    found = pattern.search(text)
    return None if found is None else float(found[1]) * UNITS[found[2]]


def shown(num_bytes: float) -> str:
    return f"{num_bytes / 2**30:.2f} GiB" if num_bytes >= 2**27 else f"{num_bytes / 2**20:.1f} MiB"
