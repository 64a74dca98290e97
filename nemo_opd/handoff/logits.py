"""Full-vocabulary logits in bf16: the reference mode (METHODS §9)."""

import torch
from torch import Tensor

from nemo_opd.handoff.base import Handle, Sender


class LogitsWriter:
    """Collects the logits of a batch, microbatch by microbatch, in a sender's buffer [B, T, W]."""

    def __init__(self, sender: Sender, num_rows: int, width: int, vocab_size: int) -> None:
        self._sender = sender
        self._logits_BTW = sender.tensor((num_rows, width, vocab_size), torch.bfloat16)

    def write(self, start: int, logits_bTW: Tensor) -> None:
        """Put a microbatch's logits at row `start`; padded columns beyond the vocabulary are left out.

        Positions beyond the microbatch's own width stay as they are: they are padding to every reader.
        """
        rows, width, _ = logits_bTW.shape
        target = self._logits_BTW[start : start + rows, :width]
        target.copy_(logits_bTW[..., : target.shape[-1]])

    def handle(self) -> Handle:
        return self._sender.handle()
