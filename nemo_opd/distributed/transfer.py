"""Tensors from the host to a device, several in one copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nemo_opd.types import Rows

_Rows = TypeVar("_Rows", bound=Rows)
_ALIGNMENT = 8
"""Bytes: the size of the largest dtype."""


def moved(rows: _Rows, device: str | torch.device) -> _Rows:
    """Return a copy of rows on a device, with all of its tensors sent together."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor, _: int) -> Tensor:
        tensors.append(tensor)
        return tensor

    rows.map(note)
    sent = iter(together(tensors, device))
    return rows.map(lambda *_: next(sent))


def together(tensors: Sequence[Tensor], device: str | torch.device) -> list[Tensor]:
    """Return copies of host tensors on a device, sent in one copy that the host does not wait for.

    They share one buffer, which lives as long as one of them does.
    """
    device = torch.device(device)
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(host.split(sizes), tensors, strict=True):
        _as(part, tensor).copy_(tensor)
    sent = host.to(device, non_blocking=True)
    return [_as(part, tensor) for part, tensor in zip(sent.split(sizes), tensors, strict=True)]


def _as(part: Tensor, like: Tensor) -> Tensor:
    """View bytes as a tensor of the shape and dtype of `like`."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)
