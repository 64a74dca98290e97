"""Tensors from the host to a device, several in one copy, and what the host still knows of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nemo_opd.types import Rows

_Rows = TypeVar("_Rows", bound=Rows)
_KNOWN = "_known_on_host"
"""Attribute of a sent tensor: the tensor that it was sent from."""
_ALIGNMENT = 16
"""Bytes: Triton compiles a kernel anew for arguments of which others begin at 16 bytes."""


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
    """Return host tensors on a device, sent in one copy that the host does not wait for; on a CPU themselves.

    They share one buffer, which lives as long as one of them does. Nobody may write into them, as the host keeps what
    it has sent.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return list(tensors)
    found = _in_one_buffer(tensors, device)
    for there, here in zip(found, tensors, strict=True):
        setattr(there, _KNOWN, here)
    return found


def _in_one_buffer(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(host.split(sizes), tensors, strict=True):
        _as(part, tensor).copy_(tensor)
    sent = host.to(device, non_blocking=True)
    return [_as(part, tensor) for part, tensor in zip(sent.split(sizes), tensors, strict=True)]


def on_host(tensor: Tensor) -> Tensor | None:
    """Return the same values on the host; None where it would have to wait for them."""
    return tensor if tensor.device.type == "cpu" else getattr(tensor, _KNOWN, None)


def planned(function: Callable[..., Sequence[Tensor]], *given: Tensor) -> list[Tensor]:
    """Return what the function makes of tensors, such as indices, whose number is in their values.

    It is computed on the host, and sent, where that knows all values. Elsewhere the host waits for the device.
    """
    known = [on_host(tensor) for tensor in given]
    if any(tensor is None for tensor in known):
        return list(function(*given))
    return together(function(*known), given[0].device)


def _as(part: Tensor, like: Tensor) -> Tensor:
    """View bytes as a tensor of the shape and dtype of `like`."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)
