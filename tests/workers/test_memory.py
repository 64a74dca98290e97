"""Out-of-memory errors become one message with the task, amounts and settings that help."""

import pickle

import numpy as np
import psutil
import pytest
import torch

from nemo_opd.errors import ClusterError, HandoffError
from nemo_opd.workers.out_of_memory import (
    BACKWARD,
    FORWARD,
    LOADING_STUDENT,
    LOSS,
    OPTIMIZER,
    Task,
    handoff_buffer,
    needs_memory,
    teacher_tasks,
)

CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 1.50 GiB. GPU 0 has a total capacity of 79.10 GiB of which 17.25 MiB is "
    "free. Process 7 has 79.00 GiB memory in use. Of the allocated memory 77.90 GiB is allocated by PyTorch"
)
TOO_MUCH = 2**50
"""One PiB."""


def message(task: Task, error: BaseException) -> str:
    with pytest.raises(ClusterError) as caught, needs_memory(task):
        raise error
    assert caught.value.__cause__ is error
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    return str(caught.value)


def test_a_full_gpu() -> None:
    text = message(FORWARD, torch.OutOfMemoryError(CUDA_MESSAGE))

    assert text.startswith("out of GPU memory in the student's forward pass: cannot allocate 1.50 GiB, 17.2 MiB free; ")
    for knob in ("train.micro_batch_size", "train.max_length", "student.activation_checkpointing=true", "offload=true"):
        assert knob in text
    assert "\n" not in text


def test_full_main_memory() -> None:
    """The errors of PyTorch's CPU allocator and of NumPy."""
    with pytest.raises(ClusterError) as of_torch, needs_memory(BACKWARD):
        torch.empty(TOO_MUCH, dtype=torch.uint8)
    with pytest.raises(ClusterError) as of_numpy, needs_memory(BACKWARD):
        np.empty(2**60, dtype=np.uint8)

    free = psutil.virtual_memory().available / 2**30
    for caught, gibibytes in ((of_torch, 2**20), (of_numpy, 2**30)):
        text = str(caught.value)
        assert text.startswith(
            f"out of main memory in the student's backward pass: cannot allocate {gibibytes:.2f} GiB, "
        )
        assert float(text.split(", ")[1].split()[0]) == pytest.approx(free, rel=0.2)


def test_errors_without_figures() -> None:
    message_text = message(LOSS, MemoryError())
    assert message_text.startswith("out of main memory in a chunk of a loss: an allocation failed, ")

    for text in ("CUDA error: out of memory", "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"):
        message_text = message(OPTIMIZER, RuntimeError(text))
        assert message_text.startswith("out of GPU memory in the optimizer's step: an allocation failed")


def test_other_errors_pass() -> None:
    for error in (
        RuntimeError("shapes differ"),
        HandoffError("out of memory"),
        ValueError("out of memory"),
        KeyError("x"),
    ):
        with pytest.raises(type(error)) as caught, needs_memory(FORWARD):
            raise error
        assert caught.value is error


def test_the_innermost_task_is_named() -> None:
    with pytest.raises(ClusterError) as caught, needs_memory(BACKWARD), needs_memory(LOSS):
        raise torch.OutOfMemoryError(CUDA_MESSAGE)

    assert "in a chunk of a loss" in str(caught.value)


PHI = teacher_tasks("teachers.1", "phi")


@pytest.mark.parametrize(
    ("task", "name", "knob"),
    [
        (LOADING_STUDENT, "loading the student", "student.parallelism.tp"),
        (PHI.loading, "loading the teacher phi", "teachers.1.offload=true"),
        (PHI.reading, "the forward pass of the teacher phi", "teachers.1.parallelism.tp"),
        (handoff_buffer("phi"), "the output of the teacher phi", "train.global_batch_size"),
    ],
)
def test_each_task_names_settings_that_help(task: Task, name: str, knob: str) -> None:
    text = message(task, torch.OutOfMemoryError(CUDA_MESSAGE))

    assert name in text
    assert knob in text


@pytest.mark.gpu
def test_a_gpu_that_is_full() -> None:
    with pytest.raises(ClusterError) as caught, needs_memory(OPTIMIZER):
        torch.empty(TOO_MUCH, dtype=torch.uint8, device="cuda")

    text = str(caught.value)
    assert text.startswith("out of GPU memory in the optimizer's step: cannot allocate 1048576.00 GiB, ")
    assert float(text.split(", ")[1].split()[0]) <= torch.cuda.mem_get_info()[1] / 2**30
