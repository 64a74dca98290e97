"""Trials of the kernels of layers on a device, before a model relies on them."""

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
"""Largest differences, in units of the last digit of the largest number: exp and 1/√ of a GPU are rough in fp32."""


@dataclass(frozen=True, slots=True)
class Trial:
    """A function by kernels and by PyTorch, of a tensor in which its arguments are together."""

    name: str
    by_kernels: Callable[[Tensor], Tensor]
    by_pytorch: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def run(self, dtype: torch.dtype, device: str) -> None:
        """Compare results and gradients. Raises KernelError where they differ by more than roundings."""
        x, weights = (torch.linspace(begin, 2, _numel(self.shape), device=device).sin() for begin in (-30, -50))
        given = x.view(self.shape).to(dtype)
        found, expected = (_values(each, given, weights) for each in (self.by_kernels, self.by_pytorch))
        allowed = _ROUNDINGS[dtype] * torch.finfo(dtype).eps
        for ours, theirs in zip(found, expected, strict=True):
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            if not error <= allowed:  # also where it is NaN
                raise KernelError(
                    f"{self.name} by Triton's kernels differs from PyTorch's by {error:.1g} of the largest number"
                )


def norm_of(width: int) -> Trial:
    return Trial("a norm", _norm, lambda x: F.rms_norm(x, x.shape[-1:], x[0], _EPS), (3, width))


def try_kernels(trials: Iterable[Trial], dtype: torch.dtype, device: str) -> None:
    """Raise KernelError where a kernel cannot be used there, or is wrong."""
    for trial in trials:
        try:
            trial.run(dtype, device)
        except KernelError:
            raise
        except Exception as error:  # whatever a Triton raises that does not fit the machine or PyTorch
            raise KernelError(f"{trial.name} by Triton's kernels fails: {type(error).__name__}: {error}") from error


def _values(function: Callable[[Tensor], Tensor], given: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    leaf = given.clone().requires_grad_()
    made = function(leaf)
    factors = weights[: made.numel()].view(made.shape).to(made.dtype)
    (gradient,) = torch.autograd.grad(made, leaf, factors)
    return made.detach().float(), gradient.float()


def _norm(x: Tensor) -> Tensor:
    made: Tensor = RMSNorm.apply(x, x[0], _EPS)
    return made


def _gated(x: Tensor) -> Tensor:
    made: Tensor = SwiGLU.apply(x)
    return made


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
