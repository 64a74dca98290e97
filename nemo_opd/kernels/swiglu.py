"""silu(gate) · up (Shazeer 2020), which reads each input once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nemo_opd.kernels import launch


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate), rounded, times `up`. gate, up: [R, F] with any row stride."""
    num_rows, num_columns = gate.shape
    output = torch.empty(num_rows, num_columns, dtype=gate.dtype, device=gate.device)
    launch.launch_layer(
        "swiglu",
        (gate, up, output),
        lambda: _forward[(num_rows, triton.cdiv(num_columns, launch.BLOCK))](
            *(gate, gate.stride(0), up, up.stride(0), output, num_columns, launch.BLOCK)
        ),
    )
    return output


def swiglu_gradient(gradient: Tensor, gate: Tensor, up: Tensor, gate_gradient: Tensor, up_gradient: Tensor) -> None:
    """Write the gradients of `gate` and `up` to `gate_gradient` and `up_gradient`.

    All tensors are [R, F] with any row stride.
    """
    num_rows, num_columns = gate.shape
    tensors = (gradient, gate, up, gate_gradient, up_gradient)
    arguments = [argument for tensor in tensors for argument in (tensor, tensor.stride(0))]
    launch.launch_layer(
        "gradient of swiglu",
        tensors,
        lambda: _backward[(num_rows, triton.cdiv(num_columns, launch.BLOCK))](*arguments, num_columns, launch.BLOCK),
    )


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    gate, gate_stride, up, up_stride, output, num_columns, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    wide = value.to(tl.float32)
    activated = (wide * tl.sigmoid(wide)).to(value.dtype).to(tl.float32)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(output + row * num_columns + column, activated * factor, mask=inside)


@triton.jit
def _backward(  # type: ignore[no-untyped-def]
    gradient,
    gradient_stride,
    gate,
    gate_stride,
    up,
    up_stride,
    gate_gradient,
    gate_gradient_stride,
    up_gradient,
    up_gradient_stride,
    num_columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < num_columns
    output_gradient = tl.load(gradient + row * gradient_stride + column, mask=inside, other=0.0).to(tl.float32)
    value = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0)
    factor = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    wide = value.to(tl.float32)
    sigmoid = tl.sigmoid(wide)
    activated = wide * sigmoid
    slope = sigmoid + activated * (1 - sigmoid)
    tl.store(gate_gradient + row * gate_gradient_stride + column, output_gradient * factor * slope, mask=inside)
    rounded = activated.to(value.dtype).to(tl.float32)
    tl.store(up_gradient + row * up_gradient_stride + column, output_gradient * rounded, mask=inside)
