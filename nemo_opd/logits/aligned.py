"""Rows aligned for a GPU's matrix products and kernels (methods.md §8.3)."""

from __future__ import annotations

import torch
from torch import Tensor

_ALIGNMENT = 64
"""Row strides are multiples of this many numbers: 128 bytes in 16 bits.

If rows are not aligned to 16 bytes, as with Qwen3's 151,669 columns, cuBLAS falls back to kernels of earlier GPUs, and
Triton's kernels load one number at a time.
"""


def row_distance(width: int, device: torch.device) -> int:
    """Return the stride of rows of `width` numbers."""
    return width if device.type == "cpu" else -(-width // _ALIGNMENT) * _ALIGNMENT


def empty_rows(num_rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return uninitialised rows [R, width] with this stride."""
    return torch.empty(num_rows, row_distance(width, device), dtype=dtype, device=device)[:, :width]
