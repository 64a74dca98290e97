"""Writing of a copy of the training state while training continues."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from nemo_opd.checkpoint.state import State, write_state


class BackgroundWriter:
    """Writer of one state at a time in a thread on every rank; the threads communicate over a separate group."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def begin(self, folder: Path, state: State) -> None:
        """Copy the state to host memory and start writing it. Collective."""
        if self._group is None:
            # Training uses the default group's collectives at the same time; gloo sends host tensors.
            self._group = dist.new_group(backend="gloo")
        folder.mkdir(parents=True, exist_ok=True)
        copied = State(tree_map_only(torch.Tensor, HostCopies(), state.shared), state.per_rank)
        self._written = self._thread.submit(write_state, folder, copied, group=self._group)

    def is_done(self) -> bool:
        """Return whether writing has finished or failed."""
        return self._written is None or self._written.done()

    def end(self) -> None:
        """Wait until the state is written. Raises the errors of writing."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Wait for a write in progress, and end the thread."""
        if self._written is not None:
            wait([self._written])
        self._thread.shutdown()


class HostCopies:
    """Function that copies a tensor with its sharding to host memory, and a tied tensor only once."""

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = local.data_ptr(), tensor.shape
        if place not in self._by_place:
            self._by_place[place] = tensor.detach().to("cpu", copy=True)
        return self._by_place[place]
