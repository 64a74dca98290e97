"""Launching of kernels, and the decision to use them."""

from __future__ import annotations

import os
import subprocess
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from nemo_opd.errors import OPDError

BLOCK = 1024
"""Columns that a kernel processes at a time."""
ROWS_BLOCK = 512
"""Columns that `rows_kernel` processes at a time. It has many values per column: with 1024 it needs 128 registers per
thread, so that two programs fit a multiprocessor; with 512 it needs 64, and four fit.
"""
WARPS = 8
"""Warps of a program."""
READ_AT_A_TIME = 16
"""Triton vectorises loads of a row if it knows that the number of columns is a multiple of this."""
SHORT = 32
"""Maximum entries of a short list."""
SHORT_TILE, LONG_TILE = (256, 2), (8, 64)
"""Lists that a program processes at a time, and entries of each. Between Llama 3.1 and Qwen3, 5,447 lists of student
tokens are short, most with two entries, and 326 have 33 to 564; all lists of teacher tokens have one.
"""

_LARGE_GPU = 132
"""Multiprocessors of an H100."""

_is_on: bool | None = None
"""Whether functions of losses are compiled; by default on all devices except CPUs."""
_has_failed = False


class KernelError(OPDError):
    """Failure to compile or launch a kernel."""


@contextmanager
def compiling(is_on: bool | None) -> Iterator[None]:
    """Set whether functions of losses are compiled and kernels used inside. None: on all devices except CPUs."""
    global _is_on
    previous, _is_on = _is_on, is_on
    try:
        yield
    finally:
        _is_on = previous


def is_compiled(device: torch.device) -> bool:
    """Return whether functions on a device are compiled."""
    return device.type != "cpu" if _is_on is None else _is_on


def launch(
    name: str, num_bytes: int, run: Callable[[], object], *, without: str = "train.compile_losses=false"
) -> None:
    """Run a kernel. Raises KernelError if it cannot be compiled or launched.

    num_bytes: memory traffic of logits, gradients and gathers without a cache, for measurements. Maps that all rows
    share count once, as they fit a GPU's cache. without: setting that avoids the kernel, for the message.
    """
    try:
        run()
    except Exception as error:
        if not _is_from_triton(error):
            raise
        reason = " ".join(str(error).split("\n")[:2]).strip()
        raise KernelError(
            f"Triton's kernel {name} could not be used: {type(error).__name__}: {reason}; {without} leaves Triton out"
        ) from error


def launch_layer(name: str, tensors: Sequence[Tensor], run: Callable[[], object]) -> None:
    """Run a layer's kernel, which reads or writes each of these tensors once. Raises KernelError."""
    launch(name, sum(tensor.nbytes for tensor in tensors), run, without="fused_layers=false of the model")


def readable(num_columns: int, *rows: Tensor) -> int:
    """Return `num_columns` rounded up to a multiple of `READ_AT_A_TIME`, if all rows or maps extend so far in memory.

    Otherwise return `num_columns`, and columns are loaded one at a time. The additional columns may hold anything.
    """
    end = -(-num_columns // READ_AT_A_TIME) * READ_AT_A_TIME
    return end if all(_extends_to(tensor, end) for tensor in rows) else num_columns


def _extends_to(rows: Tensor, num_columns: int) -> bool:
    begin_of_last = 0
    if rows.dim() == 2:
        if rows.stride(0) < num_columns:
            return False
        begin_of_last = max(len(rows) - 1, 0) * rows.stride(0)
    num_stored = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    return bool(begin_of_last + num_columns <= num_stored)


def num_multiprocessors(device: torch.device) -> int:
    """Return a GPU's number of multiprocessors; an H100's for other devices."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _LARGE_GPU


def _is_from_triton(error: Exception) -> bool:
    """Return whether an error comes from compiling or launching, not from the caller or a lack of memory.

    Errors that CUDA reports, such as an illegal access, do not count: after them the process cannot use the GPU.
    """
    from triton.errors import TritonError

    is_final = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or "CUDA error" in str(error)
    return isinstance(error, TritonError | RuntimeError | OSError | subprocess.SubprocessError) and not is_final


def give_up(error: KernelError) -> None:
    """Warn, and disable kernels in this process."""
    global _has_failed
    _has_failed = True
    warnings.warn(f"{error}; PyTorch's are used, more slowly", stacklevel=2)


def are_used(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels compute losses of logits in this dtype on a device.

    They compute in fp32, so PyTorch computes losses of fp64 logits.
    """
    is_computed = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return is_computed and not _has_failed and is_compiled(device) and is_supported(device.type)


def is_supported(device: str) -> bool:
    """Return whether Triton kernels run on a type of device; on a CPU only if interpreted."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device == "cuda" or is_interpreted) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
