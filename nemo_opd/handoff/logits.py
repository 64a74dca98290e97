"""Full-vocabulary logits: the reference mode (METHODS §9)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from nemo_opd.handoff.base import Handle, Receiver, Sender
from nemo_opd.losses.logit_rows import TensorLogits


@dataclass(frozen=True, slots=True)
class LogitsHandle:
    """To the logits [B, T, W] of a batch."""

    logits: Handle

    def rows(self, receiver: Receiver, texts: slice, width: int) -> TensorLogits:
        """Of some texts, up to `width` positions: a view of the buffer."""
        return TensorLogits(receiver.tensor(self.logits)[texts, :width])


class LogitsWriter:
    """Collects the logits of a batch, microbatch by microbatch, in a sender's buffer."""

    def __init__(self, sender: Sender, vocab_size: int, dtype: torch.dtype) -> None:
        """Columns of a head beyond the vocabulary are left out; dtype: of the buffer."""
        self._sender, self._vocab_size, self._dtype = sender, vocab_size, dtype

    def begin(self, num_texts: int, width: int) -> None:
        self._logits_BTW = self._sender.tensor((num_texts, width, self._vocab_size), self._dtype)

    def write(self, start: int, made: TensorLogits) -> None:
        """Put a microbatch's logits at row `start`.

        Positions beyond the microbatch's own width stay as they are: they are padding to every reader.
        """
        (logits_bTW,) = made.leaves
        rows, width, _ = logits_bTW.shape
        self._logits_BTW[start : start + rows, :width].copy_(logits_bTW[..., : self._vocab_size])

    def handle(self) -> LogitsHandle:
        return LogitsHandle(self._sender.handle())

    def close(self) -> None:
        self._sender.close()
