"""silu(gate) · up (Shazeer 2020), each of which is read once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate), rounded, times `up`. gate, up: [R, F], any distance between rows."""
    num_rows, num_columns = gate.shape
    found = torch.empty(num_rows, num_columns, dtype=gate.dtype, device=gate.device)
    launch.launch_layer(
        "swiglu",
        (gate, up, found),
        lambda: _forward[(num_rows, triton.cdiv(num_columns, launch.BLOCK))](
            *(gate, gate.stride(0), up, up.stride(0), found, num_columns, launch.BLOCK)
        ),
    )
    return found


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor, of_gate: Tensor, of_up: Tensor) -> None:
    """Put the gradients of `gate` and `up` into tensors of their shape, any distance between rows.

    gradient: [R, F], of any distance between rows.
    """
    num_rows, num_columns = gate.shape
    rows = [part for each in (gradient, gate, up, of_gate, of_up) for part in (each, each.stride(0))]
    launch.launch_layer(
        "gradient of swiglu",
        (gradient, gate, up, of_gate, of_up),
        lambda: _backward[(num_rows, triton.cdiv(num_columns, launch.BLOCK))](*rows, num_columns, launch.BLOCK),
    )


@triton.jit
def _forward(gate, gate_stride, up, up_stride, found, num_columns, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    given = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    wide = given.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(given.dtype).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(found + row * num_columns + column, activated * factor, mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gradient,
    gradient_stride,
    gate,
    gate_stride,
    up,
    up_stride,
    of_gate,
    of_gate_stride,
    of_up,
    of_up_stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    after = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    given = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = given.to(tl.float32)
    share = tl.sigmoid(wide)
    activated = wide * share
    tl.store(of_gate + row * of_gate_stride + column, after * factor * (share + activated * (1 - share)), mask=inside)
    rounded = activated.to(given.dtype).to(tl.float32)
    tl.store(of_up + row * of_up_stride + column, after * rounded, mask=inside)
