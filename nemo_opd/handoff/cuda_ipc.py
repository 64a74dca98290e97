"""CUDA IPC between processes that share a GPU: the receiver reads the sender's device memory, with no copy.

A handle may be mapped by one receiver, once per allocation: PyTorch counts the receiver's release towards the sender.
The sender's `close` gives the memory back once the receiver has dropped its mapping; a receiver that died cannot, and
the memory is then held until the sender's process ends.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.base import Handle, Receiver, Sender


class CudaIpcSender(Sender):
    def _allocate(self, num_bytes: int) -> tuple[Tensor, object]:
        try:
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
        except torch.OutOfMemoryError as error:
            raise HandoffError(
                f"no {num_bytes / 2**30:.2f} GiB of GPU memory for a teacher's output; lower "
                "train.global_batch_size or train.max_length, or set offload=true for the teachers or the student"
            ) from error
        return buffer, reduce_tensor(buffer)

    def _release(self, token: object) -> None:
        torch.cuda.ipc_collect()
        torch.cuda.empty_cache()

    def _flush(self) -> None:
        torch.cuda.synchronize()


class CudaIpcReceiver(Receiver):
    def _map(self, handle: Handle) -> Tensor:
        assert isinstance(handle.token, tuple)
        rebuild: Callable[..., Tensor]
        rebuild, arguments = handle.token
        try:
            return rebuild(*arguments)
        except RuntimeError as error:
            raise HandoffError(
                f"the teacher's GPU buffer cannot be mapped ({error}): its process has died, or it is on another GPU; "
                "handoff.transport=cuda_ipc needs student and teacher on the same GPU"
            ) from error

    def _collect(self) -> None:
        torch.cuda.ipc_collect()
