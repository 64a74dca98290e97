"""Shared memory between processes of one machine.

Any number of processes may map a buffer, any number of times. The memory is anonymous (memfd) and is opened through the
owner's file descriptor in /proc, so a killed process leaves nothing behind: the kernel frees the pages with the last
mapping.
"""

import errno
import mmap
import os
from dataclasses import dataclass

import psutil
import torch
from torch import Tensor

from nemo_opd.errors import HandoffError, SenderGoneError
from nemo_opd.handoff.base import Receiver, Sender
from nemo_opd.handoff.handle import Handle


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


class SharedMemorySender(Sender):
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

    def _map_file(self, number: int, num_bytes: int) -> Tensor:
        return map_file(number, num_bytes)

    def _release(self) -> None:
        os.close(self._number)

    def _flush(self) -> None:
        """Do nothing: writes to a CPU tensor are visible immediately."""


class SharedMemoryReceiver(Receiver):
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

    def _map_file(self, number: int, num_bytes: int) -> Tensor:
        return map_file(number, num_bytes)

    def _is_near(self, handle: Handle) -> bool:
        return True

    def _collect(self) -> None:
        """Do nothing: a mapping ends with its tensor."""


def _allocation_error(num_bytes: int, reason: str) -> HandoffError:
    return HandoffError(
        f"cannot allocate {num_bytes / 2**30:.2f} GiB of shared memory for a teacher's output ({reason}); lower "
        "train.global_batch_size or train.max_length, or free memory"
    )


def map_file(number: int, num_bytes: int) -> Tensor:
    """Map a file as a flat uint8 tensor; freeing the tensor unmaps it."""
    return torch.frombuffer(mmap.mmap(number, num_bytes), dtype=torch.uint8)
