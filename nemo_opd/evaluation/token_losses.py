"""Losses of single tokens in validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.logits.recording import Recording
from nemo_opd.types import Rows


@dataclass(frozen=True, slots=True)
class TokenLosses(Rows):
    """Losses at the student's tokens [B, S]; 0 where there is none."""

    nats: Tensor
    """float64 [B, S]: −log p of scored tokens."""
    kd: tuple[Tensor, ...]
    """float64 [B, S] for each part of the KD: losses of the units whose first token it is, without weights."""
    is_unit: tuple[Tensor, ...]
    """bool [B, S] for each part of the KD: whether it is the first token of a unit."""

    @staticmethod
    def of(recorded: Sequence[Recording]) -> TokenLosses:
        """Take the losses of cross-entropy and of each part of the KD, which are computed.

        Collective, as `Recording.losses`.
        """
        ce, *parts = recorded
        kd, is_unit = tuple(part.losses() for part in parts), tuple(part.is_unit() for part in parts)
        return TokenLosses(ce.losses(), kd, is_unit)

    def widened(self, width: int) -> TokenLosses:
        """Return a copy with empty positions up to `width`."""
        return self.map(lambda tensor, fill: F.pad(tensor, (0, width - tensor.shape[1]), value=fill))


def joined_losses(parts: Sequence[TokenLosses]) -> TokenLosses:
    """Return the losses of consecutive sequences as those of all, on the host."""
    width = max(part.nats.shape[1] for part in parts)
    first, *others = (part.widened(width) for part in parts)

    def joined(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors).cpu()

    return TokenLosses(
        joined(first.nats, *(part.nats for part in others)),
        tuple(map(joined, first.kd, *(part.kd for part in others))),
        tuple(map(joined, first.is_unit, *(part.is_unit for part in others))),
    )
