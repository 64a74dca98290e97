"""Elementwise parts of decoder layers as autograd functions over fused kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class RMSNorm(torch.autograd.Function):
    """`rms_norm` of x [..., D] with a weight [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from nemo_opd.kernels.rms_norm import rms_norm

        with torch.cuda.device_of(x):  # Triton launches on the current device.
            output, inverse = rms_norm(_in_rows(x).contiguous(), weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return output.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from nemo_opd.kernels.rms_norm import rms_norm_gradient

        x, weight, inverse = ctx.saved_tensors
        rows, gradient_rows = _in_rows(x).contiguous(), _in_rows(gradient).contiguous()
        with torch.cuda.device_of(x):
            x_gradient, weight_gradient = rms_norm_gradient(
                gradient_rows, rows, weight, inverse, needs_weight=ctx.needs_input_grad[1]
            )
        return x_gradient.view(x.shape), weight_gradient, None


class SwiGLU(torch.autograd.Function):
    """`swiglu` of gate and up [..., F], or of a single tensor [..., 2 · F] with both."""

    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        from nemo_opd.kernels.swiglu import swiglu

        ctx.save_for_backward(*inputs)
        gate, up = _gate_and_up(inputs)
        with torch.cuda.device_of(gate):
            return swiglu(gate, up).view(*inputs[0].shape[:-1], gate.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        from nemo_opd.kernels.swiglu import swiglu_gradient

        inputs = ctx.saved_tensors
        gradients = tuple(torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in inputs)
        with torch.cuda.device_of(gradient):
            swiglu_gradient(_in_rows(gradient), *_gate_and_up(inputs), *_gate_and_up(gradients))
        return gradients


class Rotary(torch.autograd.Function):
    """`rotated` of query and key [B, H, S, D] by cos and sin [B or 1, S, ≤ D], which get no gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, key, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_gradient: Tensor, key_gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotated(query_gradient, key_gradient, *ctx.saved_tensors, back=True), None, None


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    from nemo_opd.kernels.rotary import rotated

    query, key = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key))
    with torch.cuda.device_of(query):
        return rotated(query, key, cos.contiguous(), sin.contiguous(), back=back)


def _in_rows(x: Tensor) -> Tensor:
    """Return [..., columns] as rows [R, columns] with contiguous columns and any row stride."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _gate_and_up(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    rows = tuple(map(_in_rows, tensors))
    return rows[0].chunk(2, -1) if len(rows) == 1 else rows
