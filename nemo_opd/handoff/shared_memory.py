"""Shared memory between processes of one machine: teachers' outputs, plain or pinned for a GPU, and a model's weights.

Any number of processes may map a buffer, any number of times. The memory is anonymous (memfd) and is opened through the
owner's file descriptor in /proc, so a killed process leaves nothing behind: the kernel frees the pages with the last
mapping.
"""

import errno
import json
import logging
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from uuid import uuid4

import psutil
import torch
from torch import Tensor

from nemo_opd.errors import HandoffError, SenderGoneError
from nemo_opd.handoff.buffer import Handle, Message, Receiver, Sender

_logger = logging.getLogger(__name__)
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Safetensors names of dtypes."""


@dataclass(frozen=True, slots=True)
class FileDescriptor:
    """A process's memfd, with a name that tells it from a reused process id or descriptor."""

    pid: int
    number: int
    name: str

    @property
    def path(self) -> str:
        return f"/proc/{self.pid}/fd/{self.number}"

    def check(self) -> None:
        """Raise OSError if this machine has no such process, or the descriptor is another file."""
        if self.name not in os.readlink(self.path):
            raise FileNotFoundError(errno.ENOENT, "replaced by another file")


def _map_shared(number: int, num_bytes: int) -> Tensor:
    """Map a file as a flat uint8 tensor; freeing the tensor unmaps it."""
    return torch.frombuffer(mmap.mmap(number, num_bytes), dtype=torch.uint8)


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


class _Mapping(mmap.mmap):
    """A mapped file that is unregistered with CUDA before it is unmapped."""

    address: int | None = None
    """Address registered with CUDA, or None."""

    def __del__(self) -> None:
        if self.address is not None:
            torch.cuda.cudart().cudaHostUnregister(self.address)


@cache
def _warn_of_pageable_memory(reason: str) -> None:
    _logger.warning(
        "handoff: main memory cannot be pinned (%s), so copies to and from the GPU are slower; raise the limit of "
        "locked memory (`ulimit -l unlimited`, in Docker `--ulimit memlock=-1`)",
        reason,
    )


class SharedMemorySender(Sender):
    _map_file = staticmethod(_map_shared)

    def _allocate(self, num_bytes: int) -> tuple[Tensor, tuple[object, ...]]:
        # The kernel would kill a process rather than refuse pages, so check before allocating.
        available = psutil.virtual_memory().available
        if num_bytes > available:
            raise _allocation_error(num_bytes, f"{available / 2**30:.2f} GiB are free")
        name = f"nemo_opd-{self.identity}-{self.allocation}"
        number = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(number, 0, num_bytes)
            buffer = self._map_file(number, num_bytes)
        except OSError as error:
            os.close(number)
            raise _allocation_error(num_bytes, os.strerror(error.errno or errno.ENOMEM)) from error
        self._number = number
        return buffer, (FileDescriptor(os.getpid(), number, name),) * len(self.receivers)

    def _release(self) -> None:
        os.close(self._number)

    def _flush(self) -> None:
        """Do nothing: writes to a CPU tensor are visible immediately."""


class SharedMemoryReceiver(Receiver):
    _map_file = staticmethod(_map_shared)

    def _map(self, handle: Handle) -> Tensor:
        token = handle.token(self.number)
        assert isinstance(token, FileDescriptor)
        try:
            token.check()
            number = os.open(token.path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SenderGoneError(
                f"the teacher's buffer {token.path} cannot be opened ({error.strerror}): its process {token.pid} has "
                "released it or died; see its own error above"
            ) from error
        try:
            size = os.fstat(number).st_size
            if size < handle.num_bytes:
                raise HandoffError(f"the teacher's buffer has {size} bytes, but its handle says {handle.num_bytes}")
            return self._map_file(number, size)
        finally:
            os.close(number)

    def _is_near(self, handle: Handle) -> bool:
        return True

    def _collect(self) -> None:
        """Do nothing: a mapping ends with its tensor."""


class PinnedMemorySender(SharedMemorySender):
    _map_file = staticmethod(_map_pinned)

    def _flush(self) -> None:
        torch.cuda.synchronize()


class PinnedMemoryReceiver(SharedMemoryReceiver):
    _map_file = staticmethod(_map_pinned)

    def near(self, tensor: Tensor) -> Tensor:
        """Copy a host tensor to the device; work that is queued afterwards sees the copy."""
        if tensor.is_cuda:
            return tensor
        self.copied_bytes += tensor.nbytes
        return tensor.to("cuda", non_blocking=True)

    def _is_near(self, handle: Handle) -> bool:
        return isinstance(handle.token(self.number), Message)


class HeldWeights:
    """A safetensors file in this process's memory, which other processes read through /proc.

    The file is anonymous: it disappears once it is closed, or this process has ended, and its last reader is done. It
    is written here because the safetensors library would copy all tensors first.
    """

    def __init__(self, state: dict[str, Tensor]) -> None:
        """state: CPU tensors by name; entries are removed as they are written."""
        name = f"nemo_opd-weights-{uuid4().hex}"
        self._stream = os.fdopen(os.memfd_create(name, os.MFD_CLOEXEC), "wb")
        self.file = FileDescriptor(os.getpid(), self._stream.fileno(), name)
        # Widest dtype first, so that each tensor starts at a multiple of its element size.
        names = sorted(state, key=lambda tensor_name: -state[tensor_name].itemsize)
        self._stream.write(_header({tensor_name: state[tensor_name] for tensor_name in names}))
        for tensor_name in names:
            self._stream.write(state.pop(tensor_name).contiguous().view(-1).view(torch.uint8).numpy().data)
        self._stream.flush()

    def close(self) -> None:
        self._stream.close()


def _header(tensors: dict[str, Tensor]) -> bytes:
    """Return the header of a safetensors file with these tensors, in this order."""
    entries, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _allocation_error(num_bytes: int, reason: str) -> HandoffError:
    return HandoffError(
        f"cannot allocate {num_bytes / 2**30:.2f} GiB of shared memory for a teacher's output ({reason}); lower "
        "train.global_batch_size or train.max_length, or free memory"
    )
