"""Batched copies of tensors to a device, which remember their values on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from nemo_opd.types import Rows

_Rows = TypeVar("_Rows", bound=Rows)
_KNOWN = "_known_on_host"
"""Attribute of a device tensor: the host tensor that it was copied from."""
_ALIGNMENT = 16
"""Alignment in bytes: Triton recompiles a kernel if an argument's 16-byte alignment changes."""


def to_device(rows: _Rows, device: str | torch.device) -> _Rows:
    """Return a copy of rows on a device, with all tensors sent in one copy."""
    tensors: list[Tensor] = []

    def note(tensor: Tensor, _: int) -> Tensor:
        tensors.append(tensor)
        return tensor

    rows.map(note)
    sent = iter(to_device_batched(tensors, device))
    return rows.map(lambda *_: next(sent))


def to_device_batched(tensors: Sequence[Tensor], device: str | torch.device) -> list[Tensor]:
    """Send host tensors to a device in one asynchronous copy; for a CPU, return them unchanged.

    They share one buffer, which lives as long as any of them. They are read-only, because `on_host` returns the values
    that were sent.
    """
    device = torch.device(device)
    if device.type == "cpu":
        return list(tensors)
    sent = _send_as_one_buffer(tensors, device)
    for there, here in zip(sent, tensors, strict=True):
        setattr(there, _KNOWN, here)
    return sent


def _send_as_one_buffer(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
    for part, tensor in zip(host.split(sizes), tensors, strict=True):
        _view_like(part, tensor).copy_(tensor)
    sent = host.to(device, non_blocking=True)
    return [_view_like(part, tensor) for part, tensor in zip(sent.split(sizes), tensors, strict=True)]


def on_host(tensor: Tensor) -> Tensor | None:
    """Return the same values on the host, or None if the host would have to wait for them."""
    return tensor if tensor.device.type == "cpu" else getattr(tensor, _KNOWN, None)


def to_list(integers: Tensor) -> list[int]:
    """Return the values of a tensor [X]. Waits for the device unless the host has them."""
    host_integers = on_host(integers)
    return list((integers if host_integers is None else host_integers).tolist())


def compute_on_host(function: Callable[..., Sequence[Tensor]], *tensors: Tensor) -> list[Tensor]:
    """Compute a function whose results' sizes depend on values, such as `nonzero`.

    It is computed on the host and sent to the device if the host has all values; otherwise the host waits for the
    device.
    """
    host_tensors = [on_host(tensor) for tensor in tensors]
    if any(tensor is None for tensor in host_tensors):
        return list(function(*tensors))
    return to_device_batched(function(*host_tensors), tensors[0].device)


def _view_like(part: Tensor, like: Tensor) -> Tensor:
    """View bytes as a tensor of the shape and dtype of `like`."""
    return part[: like.nbytes].view(like.dtype).view(like.shape)
