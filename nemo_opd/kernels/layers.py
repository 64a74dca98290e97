"""Elementwise parts of decoder layers as functions that autograd knows, each of few kernels."""

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
            found, inverse = rms_norm(_in_rows(x).contiguous(), weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return found.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from nemo_opd.kernels.rms_norm import rms_norm_gradient

        x, weight, inverse = ctx.saved_tensors
        after, before = _in_rows(gradient).contiguous(), _in_rows(x).contiguous()
        with torch.cuda.device_of(x):
            found, of_weight = rms_norm_gradient(after, before, weight, inverse, of_weight=ctx.needs_input_grad[1])
        return found.view(x.shape), of_weight, None


class SwiGLU(torch.autograd.Function):
    """`swiglu` of gate and up [..., F], or of both in one tensor [..., 2 · F]."""

    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Tensor:
        from nemo_opd.kernels.swiglu import swiglu

        ctx.save_for_backward(*given)
        gate, up = _halves(given)
        with torch.cuda.device_of(gate):
            return swiglu(gate, up).view(*given[0].shape[:-1], gate.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        from nemo_opd.kernels.swiglu import swiglu_gradient

        given = ctx.saved_tensors
        made = tuple(torch.empty_like(each, memory_format=torch.contiguous_format) for each in given)
        with torch.cuda.device_of(gradient):
            swiglu_gradient(_in_rows(gradient), *_halves(given), *_halves(made))
        return made


class Rotary(torch.autograd.Function):
    """`rotated` of query and key [B, H, S, D] by cos and sin [B or 1, S, ≤ D], which get no gradient."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(cos, sin)
        return _rotated(query, key, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, of_query: Tensor, of_key: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotated(of_query, of_key, *ctx.saved_tensors, back=True), None, None


def _rotated(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    from nemo_opd.kernels.rotary import rotated

    query, key = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, key))
    with torch.cuda.device_of(query):
        return rotated(query, key, cos.contiguous(), sin.contiguous(), back=back)


def _in_rows(x: Tensor) -> Tensor:
    """Return [R, columns], of any distance between rows, from [..., columns]."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _halves(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    rows = tuple(map(_in_rows, given))
    return rows[0].chunk(2, -1) if len(rows) == 1 else rows
