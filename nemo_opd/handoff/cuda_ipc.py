"""CUDA IPC between processes of one node: receivers read the sender's device memory without a copy.

PyTorch counts references to exported memory: each token is one reference, released when its receiver drops the
mapping. So each receiver gets its own token and maps once per allocation. The sender's `close` frees the memory once
all receivers have dropped their mappings. If a receiver died or never mapped its export, the memory stays allocated
until the sender's process ends.

If a buffer is on another GPU of the node, the receiver opens it on its own device and reads it through peer access,
even if the sender's device is not visible to it (each Ray actor sees only its own GPU): its kernels read the buffer
like local memory, at the speed of the link. A loss moves the rows of a chunk this way as it reads them; the head, which
every chunk reads in full, is copied once.

The reference counters are in a file in /dev/shm (80 kB). The sender removes it, or its receivers do if the sender died;
it stays only if all of them are killed.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nemo_opd.errors import HandoffError, SenderGoneError
from nemo_opd.handoff.buffer import Handle, Receiver, Sender


@dataclass(frozen=True, slots=True, eq=False)
class _DeviceMemory:
    """One reference to a buffer, for one receiver."""

    pid: int
    """Process of the sender."""
    device: str
    """The GPU's UUID: indices mean different devices in different processes."""
    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]


class CudaIpcSender(Sender):
    def tensor(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        torch.cuda.ipc_collect()  # frees released buffers whose receivers have since dropped their mappings
        return super().tensor(shape, dtype)

    def _allocate(self, num_bytes: int) -> tuple[Tensor, tuple[object, ...]]:
        try:
            with _mappable_memory():
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise HandoffError(
                f"cannot allocate {num_bytes / 2**30:.2f} GiB of GPU memory for a teacher's output; lower "
                "train.global_batch_size or train.max_length, or set offload=true for the teachers or the student"
            ) from error
        return buffer, tuple(
            _DeviceMemory(os.getpid(), _current_gpu_uuid(), *reduce_tensor(buffer)) for _ in self.receivers
        )

    def _release(self) -> None:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def _flush(self) -> None:
        torch.cuda.synchronize()


@contextmanager
def _mappable_memory() -> Iterator[None]:
    """Allocate memory that other processes can map: no expandable segments, which they often cannot.

    A separate pool keeps the allocator from reusing free blocks of such segments.
    """
    if not _has_expandable_segments():
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
    try:
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def _has_expandable_segments() -> bool:
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in setting.lower().replace(" ", "") for setting in settings)


class CudaIpcReceiver(Receiver):
    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self._counters: dict[Path, int] = {}
        """Process id of the sender, keyed by the file of its reference counters."""

    def _map(self, handle: Handle) -> Tensor:
        token = handle.token(self.number)
        assert isinstance(token, _DeviceMemory)
        call = signature(token.rebuild).bind(*token.arguments)
        call.arguments["storage_device"] = torch.cuda.current_device()
        # The sender synchronized before it created the handle; its event may be on a device that is not visible here.
        call.arguments["event_sync_required"] = False
        counters = os.fsdecode(call.arguments["ref_counter_handle"])
        self._counters[Path("/dev/shm") / counters.lstrip("/")] = token.pid
        try:
            return token.rebuild(*call.args)
        except RuntimeError as error:
            if not psutil.pid_exists(token.pid):
                raise SenderGoneError(
                    f"the teacher's GPU buffer on {token.device} cannot be mapped: its process {token.pid} has died; "
                    "see its own error above"
                ) from error
            raise HandoffError(
                f"the teacher's GPU buffer on {token.device} cannot be mapped on {_current_gpu_uuid()} ({error}): "
                "the GPUs have no peer access to each other (nvidia-smi topo -p2p r), "
                "or the processes do not share PID and IPC namespaces (in Docker "
                "`--pid=host --ipc=host`); write handoff.transport=shared_memory, which goes through main memory"
            ) from error

    def _is_near(self, handle: Handle) -> bool:
        token = handle.token(self.number)
        return not isinstance(token, _DeviceMemory) or token.device == _current_gpu_uuid()

    def _collect(self) -> None:
        torch.cuda.ipc_collect()
        for file, pid in self._counters.items():
            if not psutil.pid_exists(pid):
                file.unlink(missing_ok=True)
        self._counters.clear()


def _current_gpu_uuid() -> str:
    """Return the UUID of the GPU that this process computes on."""
    return str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
