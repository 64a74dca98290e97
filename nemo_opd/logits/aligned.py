"""Rows that begin where a GPU's matrix products and kernels read them fastest (methods.md §8.3)."""

from __future__ import annotations

import torch
from torch import Tensor

_NUMBERS = 64
"""Numbers between the starts of rows, or a multiple: 128 bytes in 16 bits.

If rows do not begin at 16 bytes, as with Qwen3's 151,669 columns, cuBLAS takes kernels of earlier GPUs, and Triton's
kernels load one number at a time.
"""


def row_distance(width: int, device: torch.device) -> int:
    """Return how many numbers lie between the starts of two rows of `width` numbers."""
    return width if device.type == "cpu" else -(-width // _NUMBERS) * _NUMBERS


def empty_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return rows [R, width] at this distance, not initialised."""
    return torch.empty(num_rows, row_distance(width, device), dtype=dtype, device=device)[:, :width]
