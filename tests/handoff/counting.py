"""A transport within one process that counts references as CUDA IPC does: a receiver takes its export exactly once."""

from itertools import count

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.buffer import Handle, Receiver, Sender

TOKENS = count()
EXPORTED: dict[int, Tensor] = {}
"""Buffers of exports that no receiver has taken yet, keyed by token."""


class CountingSender(Sender):
    def _allocate(self, num_bytes: int) -> tuple[Tensor, tuple[object, ...]]:
        # Not zeros, so that a test that reads unwritten memory fails.
        buffer = torch.full((num_bytes,), 255, dtype=torch.uint8)
        tokens = [next(TOKENS) for _ in self.receivers]
        EXPORTED.update(dict.fromkeys(tokens, buffer))
        return buffer, tuple(tokens)

    def _release(self) -> None: ...

    def _flush(self) -> None: ...


class CountingReceiver(Receiver):
    is_near = True

    def _map(self, handle: Handle) -> Tensor:
        token = handle.token(self.number)
        assert isinstance(token, int)
        if token not in EXPORTED:
            raise HandoffError(f"token {token} was already taken")
        return EXPORTED.pop(token)

    def _is_near(self, handle: Handle) -> bool:
        return self.is_near

    def _collect(self) -> None: ...
