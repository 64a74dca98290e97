"""Packings for tests that only need lengths; all ids are 0."""

import torch
from torch import Tensor

from nemo_opd.logits.sources import Packing
from nemo_opd.types import TokenRows


def packing_of(*lengths: int, width: int | None = None) -> Packing:
    shape = len(lengths), max(lengths) if width is None else width
    ids = torch.zeros(shape, dtype=torch.int64)
    return Packing.of(TokenRows(ids, torch.tensor(lengths), ids.bool(), ids.int()))


def unpadded(ids: Tensor) -> Packing:
    """Return the packing of ids [B, S] without padding."""
    num_rows, width = ids.shape
    return packing_of(*[width] * num_rows)
