"""A transport within one process that counts as CUDA IPC does: every export is taken by one receiver, once."""

from itertools import count

import torch
from torch import Tensor

from nemo_opd.errors import HandoffError
from nemo_opd.handoff.buffer import Handle, Receiver, Sender

TOKENS = count()
EXPORTED: dict[int, Tensor] = {}
"""Tokens that no receiver has taken yet."""


class CountingSender(Sender):
    def _allocate(self, num_bytes: int) -> tuple[Tensor, tuple[object, ...]]:
        # What nobody writes must not be taken for zeros.
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
            raise HandoffError(f"token {token} was taken before")
        return EXPORTED.pop(token)

    def _is_near(self, handle: Handle) -> bool:
        return self.is_near

    def _collect(self) -> None: ...
