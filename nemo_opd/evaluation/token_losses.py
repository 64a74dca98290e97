"""Per-token losses in validation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.logits.recording import UnitLossRecorder
from nemo_opd.types import Rows


@dataclass(frozen=True, slots=True)
class TokenLosses(Rows):
    """Losses at the student's tokens [B, S], 0 at tokens without one."""

    nats: Tensor
    """float64 [B, S]: −log p of scored tokens."""
    kd: tuple[Tensor, ...]
    """float64 [B, S] for each part of the KD: unweighted loss of each unit, at the unit's first token."""
    is_unit: tuple[Tensor, ...]
    """bool [B, S] for each part of the KD: True at the first token of a unit."""

    @staticmethod
    def of(recorded: Sequence[UnitLossRecorder]) -> TokenLosses:
        """Return the recorded losses; recorded: cross-entropy, then each part of the KD. Collective."""
        ce, *parts = recorded
        kd, is_unit = tuple(part.losses() for part in parts), tuple(part.is_unit() for part in parts)
        return TokenLosses(ce.losses(), kd, is_unit)

    def widened(self, width: int) -> TokenLosses:
        """Return a copy, padded to `width` positions."""
        return self.map(lambda tensor, fill: F.pad(tensor, (0, width - tensor.shape[1]), value=fill))


def joined_losses(parts: Sequence[TokenLosses]) -> TokenLosses:
    """Concatenate the losses of consecutive sequences, on the host."""
    width = max(part.nats.shape[1] for part in parts)
    padded = [part.widened(width) for part in parts]

    def join(*tensors: Tensor) -> Tensor:
        return torch.cat(tensors).cpu()

    return TokenLosses(
        join(*(part.nats for part in padded)),
        tuple(map(join, *(part.kd for part in padded))),
        tuple(map(join, *(part.is_unit for part in padded))),
    )
