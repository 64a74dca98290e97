"""A copy of the training state, written while training goes on."""

from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from nemo_opd.checkpoint.state import State, write_state


class BackgroundWriter:
    """Writer of one state at a time in a thread, on every rank, with a separate process group for their agreement."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._written: Future[None] | None = None
        self._group: dist.ProcessGroup | None = None

    def begin(self, folder: Path, state: State) -> None:
        """Copy the state to the host's memory, and begin to write it. Every rank must call it."""
        if self._group is None:
            # The default group's collectives are the training's; gloo, for what is on the host.
            self._group = dist.new_group(backend="gloo")
        folder.mkdir(parents=True, exist_ok=True)
        copied = State(tree_map_only(torch.Tensor, HostCopies(), state.shared), state.of_rank)
        self._written = self._thread.submit(write_state, folder, copied, group=self._group)

    def is_done(self) -> bool:
        """Return whether the state is written, or could not be."""
        return self._written is None or self._written.done()

    def end(self) -> None:
        """Wait until the state is written. Raises what writing raised."""
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def close(self) -> None:
        """Wait for what is being written."""
        if self._written is not None:
            wait([self._written])
        self._thread.shutdown()


class HostCopies:
    """Function that copies a tensor to the host's memory, sharded as it is; once where it has several names, as a head
    that is the embedding.
    """

    def __init__(self) -> None:
        self._by_place: dict[tuple[int, torch.Size], torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        own = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        place = own.data_ptr(), tensor.shape
        if place not in self._by_place:
            self._by_place[place] = tensor.detach().to("cpu", copy=True)
        return self._by_place[place]
