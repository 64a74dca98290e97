"""Launching of kernels, and whether it is done."""

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
"""Columns that a kernel takes at a time."""
ROWS_BLOCK = 512
"""Columns that the pass over rows takes at a time, which has many numbers of each: with 1024 it needs 128 registers
of a thread, of two programs a multiprocessor, and 64 with 512, of four.
"""
WARPS = 8
"""Warps of a program."""
READ_AT_A_TIME = 16
"""Numbers: Triton loads several of a row at a time if it knows that a multiple of them is read."""
SHORT = 32
"""Entries of a short list."""
SHORT_TILE, LONG_TILE = (256, 2), (8, 64)
"""Lists that a program takes at a time, and entries of each. Between Llama 3.1 and Qwen3, 5,447 lists of a student's
tokens are short, most of two entries, and 326 have 33 to 564; all of the teacher's tokens have one.
"""

_LARGE_GPU = 132
"""Multiprocessors of an H100."""

_is_on: bool | None = None
"""Whether functions of losses are compiled; None: on all devices but CPUs."""
_has_failed = False


class KernelError(OPDError):
    """A kernel that could not be compiled or launched."""


@contextmanager
def compiling(is_on: bool | None) -> Iterator[None]:
    """Compile functions of losses inside and use kernels, on any device; False: do neither; None: not on CPUs."""
    global _is_on
    before, _is_on = _is_on, is_on
    try:
        yield
    finally:
        _is_on = before


def is_compiled(device: torch.device) -> bool:
    """Return whether functions on a device are compiled."""
    return device.type != "cpu" if _is_on is None else _is_on


def launch(
    name: str, num_bytes: int, run: Callable[[], object], *, without: str = "train.compile_losses=false"
) -> None:
    """Run a kernel. Raises KernelError where it cannot be.

    num_bytes: what it reads and writes of rows of logits and gradients, nothing of it from a cache, and what gathers
    take. Maps that all rows share are counted once: they are small enough to stay in a GPU's cache. without: the
    setting that leaves it out.
    """
    try:
        run()
    except Exception as error:
        if not _is_tritons(error):
            raise
        reason = " ".join(str(error).split("\n")[:2]).strip()
        raise KernelError(
            f"Triton's kernel {name} could not be used: {type(error).__name__}: {reason}; {without} leaves Triton out"
        ) from error


def launch_layer(name: str, tensors: Sequence[Tensor], run: Callable[[], object]) -> None:
    """Run a kernel of a layer, which reads or writes each of these tensors once. Raises KernelError."""
    launch(name, sum(each.nbytes for each in tensors), run, without="fused_layers=false of the model")


def readable(num_columns: int, *rows: Tensor) -> int:
    """Return how many columns to read of rows or maps for `num_columns`: some more if all have them in memory.

    They may hold anything. Loads of a number of columns that is not a multiple of `READ_AT_A_TIME` take one at a time.
    """
    end = -(-num_columns // READ_AT_A_TIME) * READ_AT_A_TIME
    return end if all(_has(each, end) for each in rows) else num_columns


def _has(rows: Tensor, num_columns: int) -> bool:
    begin_of_last = 0
    if rows.dim() == 2:
        if rows.stride(0) < num_columns:
            return False
        begin_of_last = max(len(rows) - 1, 0) * rows.stride(0)
    num_stored = rows.untyped_storage().nbytes() // rows.element_size() - rows.storage_offset()
    return bool(begin_of_last + num_columns <= num_stored)


def num_multiprocessors(device: torch.device) -> int:
    """Return how many programs a GPU runs at once, at least; elsewhere as many as a large one."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _LARGE_GPU


def _is_tritons(error: Exception) -> bool:
    """Return whether an error is of compiling or launching, and no mistake of a caller and no lack of memory.

    After an error that CUDA reports, such as an illegal access, nothing can be computed in this process any more.
    """
    from triton.errors import TritonError

    is_final = isinstance(error, torch.OutOfMemoryError) or "out of memory" in str(error) or "CUDA error" in str(error)
    return isinstance(error, TritonError | RuntimeError | OSError | subprocess.SubprocessError) and not is_final


def give_up(error: KernelError) -> None:
    """Launch no kernels from now on, and say so."""
    global _has_failed
    _has_failed = True
    warnings.warn(f"{error}; PyTorch's are used, more slowly", stacklevel=2)


def are_used(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether kernels compute losses of logits of this type there; on a CPU they would have to be interpreted.

    They compute in fp32, so that fp64 is left to PyTorch.
    """
    takes = dtype in (torch.float32, torch.bfloat16, torch.float16)
    return takes and not _has_failed and is_compiled(device) and is_supported(device.type)


def is_supported(device: str) -> bool:
    """Return whether Triton has kernels for a type of device."""
    is_interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return (device == "cuda" or is_interpreted) and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None
