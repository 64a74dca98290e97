"""Adds empty rows to batches."""

import torch

from nemo_opd.data.collate import gather_rows
from nemo_opd.types import Batch


def num_rows(batch: Batch) -> int:
    """Return the number of rows that the sequences were packed into."""
    assert batch.row is not None
    return int(batch.row[-1]) + 1


def pad_rows(batch: Batch, rows: int) -> Batch:
    """Append empty sequences, so that there are `rows`."""
    return gather_rows(batch, torch.arange(rows).masked_fill(torch.arange(rows) >= len(batch), -1))
