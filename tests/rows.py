"""Batches with more rows than they were made with."""

import torch

from nemo_opd.data.collate import placed
from nemo_opd.types import Batch


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Append empty sequences, so that there are `rows`."""
    return placed(batch, torch.arange(rows).masked_fill(torch.arange(rows) >= len(batch), -1))
