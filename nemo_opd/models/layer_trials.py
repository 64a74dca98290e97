"""Trials of the layer kernels on a device, before a model relies on them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.llama import modeling_llama as llama

from nemo_opd.kernels.launch import KernelError
from nemo_opd.kernels.layers import RMSNorm, Rotary, SwiGLU

_EPS = 1e-6
_ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 64}
"""Maximum error, in machine epsilons of the largest number: a GPU's exp and 1/√ are inaccurate in fp32."""


@dataclass(frozen=True, slots=True)
class Trial:
    """Function computed by kernels and by PyTorch, whose arguments are slices of one tensor."""

    name: str
    by_kernels: Callable[[Tensor], Tensor]
    by_pytorch: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def run(self, dtype: torch.dtype, device: str) -> None:
        """Compare results and gradients. Raises KernelError if they differ by more than rounding errors."""
        x, weights = (torch.linspace(begin, 2, _numel(self.shape), device=device).sin() for begin in (-30, -50))
        x = x.view(self.shape).to(dtype)
        results, expected = (_results(function, x, weights) for function in (self.by_kernels, self.by_pytorch))
        allowed = _ROUNDINGS[dtype] * torch.finfo(dtype).eps
        for ours, theirs in zip(results, expected, strict=True):
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            if not error <= allowed:  # also if it is NaN
                raise KernelError(
                    f"{self.name} by Triton's kernels differs from PyTorch's by {error:.1g} of the largest number"
                )


def norm_of(width: int) -> Trial:
    return Trial("a norm", _norm, lambda x: F.rms_norm(x, x.shape[-1:], x[0], _EPS), (3, width))


def try_kernels(trials: Iterable[Trial], dtype: torch.dtype, device: str) -> None:
    """Raise KernelError if a kernel fails on the device or gives wrong results."""
    for trial in trials:
        try:
            trial.run(dtype, device)
        except KernelError:
            raise
        except Exception as error:  # a Triton that does not fit the machine or PyTorch may raise anything
            raise KernelError(f"{trial.name} by Triton's kernels fails: {type(error).__name__}: {error}") from error


def _results(function: Callable[[Tensor], Tensor], x: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Return the function's result, and the gradient of its sum weighted with `weights`, in fp32."""
    leaf = x.clone().requires_grad_()
    result = function(leaf)
    factors = weights[: result.numel()].view(result.shape).to(result.dtype)
    (gradient,) = torch.autograd.grad(result, leaf, factors)
    return result.detach().float(), gradient.float()


def _norm(x: Tensor) -> Tensor:
    result: Tensor = RMSNorm.apply(x, x[0], _EPS)
    return result


def _gated(x: Tensor) -> Tensor:
    result: Tensor = SwiGLU.apply(x)
    return result


def _gated_by_pytorch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotated(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        angles = x[:, 0].detach()
        return torch.cat(rotate(x[:, 1:3], x[:, 3:], angles.cos(), angles.sin()), 1)

    return function


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()


GATE = Trial("a gate", _gated, _gated_by_pytorch, (3, 64))
ROTATION = Trial("a rotation", _rotated(Rotary.apply), _rotated(llama.apply_rotary_pos_emb), (2, 4, 3, 16))
