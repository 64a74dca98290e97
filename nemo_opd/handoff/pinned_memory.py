"""Shared memory for processes that compute on GPUs but cannot map each other's GPU memory.

Each process registers its mapping with CUDA, so that copies to and from the GPU are asynchronous. If CUDA refuses, for
example because locked memory is limited, copies still work, but the host waits for them.
"""

import logging
import mmap
from contextlib import suppress
from functools import cache

import torch
from torch import Tensor

from nemo_opd.handoff.handle import Handle, Message
from nemo_opd.handoff.shared_memory import SharedMemoryReceiver, SharedMemorySender

_logger = logging.getLogger(__name__)


class PinnedMemorySender(SharedMemorySender):
    def _map_file(self, number: int, num_bytes: int) -> Tensor:
        return _map_pinned(number, num_bytes)

    def _flush(self) -> None:
        torch.cuda.synchronize()


class PinnedMemoryReceiver(SharedMemoryReceiver):
    def near(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device; work that is queued afterwards sees the copy."""
        if tensor.is_cuda:
            return tensor
        self.copied_bytes += tensor.nbytes
        return tensor.to("cuda", non_blocking=True)

    def _map_file(self, number: int, num_bytes: int) -> Tensor:
        return _map_pinned(number, num_bytes)

    def _is_near(self, handle: Handle) -> bool:
        return isinstance(handle.token(self.number), Message)


class _Mapping(mmap.mmap):
    """A mapped file that is unregistered with CUDA before it is unmapped."""

    address: int | None = None
    """Address registered with CUDA, or None."""

    def __del__(self) -> None:
        if self.address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


def _map_pinned(number: int, num_bytes: int) -> Tensor:
    """Map a file as a flat uint8 tensor, pinned if CUDA allows it; freeing the tensor undoes both."""
    mapping = _Mapping(number, num_bytes)
    tensor = torch.frombuffer(mapping, dtype=torch.uint8)
    try:
        torch.cuda.check_error(torch.cuda.cudart().cudaHostRegister(tensor.data_ptr(), num_bytes, 0))
    except RuntimeError as error:
        _warn_of_pageable_memory(str(error))
        with suppress(RuntimeError, AssertionError):
            # CUDA reports the error again at the next call, which would be some kernel of the model.
            torch.ones(1, device="cuda")
    else:
        mapping.address = tensor.data_ptr()
    return tensor


@cache
def _warn_of_pageable_memory(reason: str) -> None:
    _logger.warning(
        "handoff: main memory cannot be pinned (%s), so copies to and from the GPU are slower; raise the limit of "
        "locked memory (`ulimit -l unlimited`, in Docker `--ulimit memlock=-1`)",
        reason,
    )
