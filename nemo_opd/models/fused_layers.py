"""Fused kernels for the elementwise parts of decoder layers: norms, rotary embeddings, gated activations.

A module is replaced if its code in transformers equals Llama's or Phi-3's, whatever the model family. Only the given
model's modules change, not their classes. A trial compares the kernels with PyTorch before they are used.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from inspect import unwrap
from math import prod
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3

from nemo_opd.errors import ModelError
from nemo_opd.kernels import launch
from nemo_opd.kernels.launch import KernelError

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32)
_ROTATE = "apply_rotary_pos_emb"
_WIDEST = 2**15
"""Maximum row width of the norm kernel."""
_EPS = 1e-6
_ROUNDINGS = {torch.bfloat16: 4, torch.float16: 4, torch.float32: 64}
"""Maximum error, in machine epsilons of the largest number: a GPU's exp and 1/√ are inaccurate in fp32."""


def fuse_layers(
    model: PreTrainedModel, setting: bool | Literal["auto"], dtype: torch.dtype, device: str, *, key: str
) -> None:
    """Replace elementwise parts of a model, which may be on meta and is not yet sharded.

    setting: `fused_layers`. dtype: compute dtype on `device`. If a trial of the kernels fails, warns with `auto` and
    raises ModelError naming `key` with `True`. Raises what `check_fused_layers` does.
    """
    check_fused_layers(model, setting, device, key=key)
    if not may_fuse(setting, dtype, device):
        return
    parts = list(_parts(model))
    try:
        try_kernels({(part.trial.name, part.trial.shape): part.trial for part in parts}.values(), dtype, device)
    except KernelError as error:
        if setting is True:
            raise ModelError(f"{key}.fused_layers=true: {error}") from error
        warnings.warn(f"{key}: {error}; PyTorch computes its layers, more slowly", stacklevel=2)
        return
    _replace(parts)


def check_fused_layers(model: nn.Module, setting: bool | Literal["auto"], device: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, if fusing is required but the device or the model does not allow it."""
    if setting is not True:
        return
    if not launch.is_supported(device):
        why = f"Triton needs a GPU, and the device is {device}"
    elif next(_parts(model), None) is None:
        why = f"no part of the layers of {type(model).__name__} is known"
    else:
        return
    raise ModelError(f"{key}.fused_layers=true: {why}; leave it out, and PyTorch computes what has no kernels")


def may_fuse(setting: bool | Literal["auto"], dtype: torch.dtype, device: str) -> bool:
    """Return whether setting, dtype and device allow fused layers."""
    dtypes = _HALF if setting == "auto" else _DTYPES
    return bool(setting) and dtype in dtypes and launch.is_supported(device)


def replace_parts(model: nn.Module) -> None:
    """Replace elementwise parts without a trial of their kernels."""
    _replace(_parts(model))


def is_known(layer: nn.Module) -> bool:
    """Return whether all norms of a decoder layer, and its MLP, can be replaced."""
    replaceable = {type(part.module) for part in _parts(layer)}
    needed = {type(module) for module in layer.modules() if is_norm(module) or type(module).__name__.endswith("MLP")}
    return bool(needed) and needed <= replaceable


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by its name."""
    return "norm" in type(module).__name__.lower()


@dataclass(frozen=True, slots=True)
class _Part:
    """Module with a fused replacement."""

    module: nn.Module
    forward: Callable[..., Any]
    """Replacement of the class's method."""
    trial: _Trial


def _replace(parts: Iterable[_Part]) -> None:
    for part in parts:
        part.module.forward = MethodType(part.forward, part.module)


def _parts(model: nn.Module) -> Iterator[_Part]:
    for module in model.modules():
        forward = unwrap(type(module).forward)  # without decorators that rename arguments
        if "forward" in vars(module):  # already replaced
            continue
        if _is_like(forward, llama.LlamaRMSNorm.forward):
            weight: Any = module.weight
            if len(weight) <= _WIDEST:
                yield _Part(module, _norm, norm_of(len(weight)))
        elif _is_like(forward, llama.LlamaMLP.forward) and _is_silu(module.act_fn):
            yield _Part(module, _gated, GATE)
        elif _is_like(forward, phi3.Phi3MLP.forward) and _is_silu(module.activation_fn):
            yield _Part(module, _gated_from_one_matrix, GATE)
        elif (rotate := _rotation(forward)) is not None:
            yield _Part(module, _with_rotation(forward, rotate), ROTATION)


def _is_like(function: Any, reference: Any) -> bool:
    """Return whether two functions have the same code, ignoring string constants such as docstrings."""
    return _code(reference) == _code(function)


def _code(function: Any) -> tuple[Any, ...] | None:
    code = getattr(function, "__code__", None)  # functions replaced by the package `kernels` have none
    if code is None:
        return None
    return code.co_code, code.co_names, tuple(const for const in code.co_consts if not isinstance(const, str))


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU | SiLUActivation)


def _rotation(forward: Any) -> Callable[..., Any] | None:
    """Return the rotation that an attention's forward calls, if it is Llama's or Phi-3's."""
    code = getattr(forward, "__code__", None)
    if code is None or _ROTATE not in code.co_names:
        return None
    rotate = forward.__globals__.get(_ROTATE)
    is_same = _is_like(rotate, llama.apply_rotary_pos_emb) or _is_like(rotate, phi3.apply_rotary_pos_emb)
    if not is_same or not _is_like(rotate.__globals__.get("rotate_half"), llama.rotate_half):
        return None
    rotation: Callable[..., Any] = rotate
    return rotation


def _with_rotation(forward: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of an attention's forward that rotates by a kernel.

    The rotation is a global of the forward's Python module. The copy has globals with another rotation, so that the
    Python module stays unchanged.
    """

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        width, is_table = query.shape[-1], cos.dim() == 3 and cos.shape == sin.shape and not cos.requires_grad
        is_partial = is_table and cos.shape[-1] < width and _is_like(plain, phi3.apply_rotary_pos_emb)
        if unsqueeze_dim != 1 or not is_table or not (cos.shape[-1] == width or is_partial):
            return plain(query, key, cos, sin, unsqueeze_dim)
        return Rotary.apply(query, key, cos, sin) if _suit(query, key, cos, sin) else plain(query, key, cos, sin)

    fused = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTATE: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    fused.__kwdefaults__ = forward.__kwdefaults__
    return fused


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    if not _suit(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


def _gated(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    gated = SwiGLU.apply(gate, up) if _suit(gate, up) else self.act_fn(gate) * up
    return self.down_proj(gated)


def _gated_from_one_matrix(self: Any, hidden_states: Tensor) -> Tensor:
    gate_up = self.gate_up_proj(hidden_states)
    if _suit(gate_up):
        return self.down_proj(SwiGLU.apply(gate_up))
    gate, up = gate_up.chunk(2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


def _suit(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors. PyTorch computes otherwise, for example in an offloaded model."""
    first = tensors[0]
    is_supported = first.dtype in _DTYPES and first.numel() > 0 and launch.is_supported(first.device.type)
    return is_supported and all(x.dtype == first.dtype and not isinstance(x, DTensor) for x in tensors)


class RMSNorm(torch.autograd.Function):
    """`rms_norm` of x [..., D] with a weight [D]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        from nemo_opd.kernels.layers import rms_norm

        with torch.cuda.device_of(x):  # Triton launches on the current device.
            output, inverse = rms_norm(_in_rows(x).contiguous(), weight, eps)
        ctx.save_for_backward(x, weight, inverse)
        return output.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        from nemo_opd.kernels.layers import rms_norm_gradient

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
        from nemo_opd.kernels.layers import swiglu

        ctx.save_for_backward(*inputs)
        gate, up = _gate_and_up(inputs)
        with torch.cuda.device_of(gate):
            return swiglu(gate, up).view(*inputs[0].shape[:-1], gate.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        from nemo_opd.kernels.layers import swiglu_gradient

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
        return _rotate(query, key, cos, sin, back=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, query_gradient: Tensor, key_gradient: Tensor) -> tuple[Tensor | None, ...]:
        return *_rotate(query_gradient, key_gradient, *ctx.saved_tensors, back=True), None, None


def _rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, *, back: bool) -> tuple[Tensor, Tensor]:
    from nemo_opd.kernels.layers import rotated

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


@dataclass(frozen=True, slots=True)
class _Trial:
    """Function computed by kernels and by PyTorch, whose arguments are slices of one tensor."""

    name: str
    by_kernels: Callable[[Tensor], Tensor]
    by_pytorch: Callable[[Tensor], Tensor]
    shape: tuple[int, ...]

    def run(self, dtype: torch.dtype, device: str) -> None:
        """Compare results and gradients. Raises KernelError if they differ by more than rounding errors."""
        x, weights = (torch.linspace(begin, 2, prod(self.shape), device=device).sin() for begin in (-30, -50))
        x = x.view(self.shape).to(dtype)
        results, expected = (_results(function, x, weights) for function in (self.by_kernels, self.by_pytorch))
        allowed = _ROUNDINGS[dtype] * torch.finfo(dtype).eps
        for ours, theirs in zip(results, expected, strict=True):
            error = float((ours - theirs).abs().max() / theirs.abs().max())
            if not error <= allowed:  # also if it is NaN
                raise KernelError(
                    f"{self.name} by Triton's kernels differs from PyTorch's by {error:.1g} of the largest number"
                )


def norm_of(width: int) -> _Trial:
    return _Trial(
        "a norm",
        lambda x: RMSNorm.apply(x, x[0], _EPS),
        lambda x: F.rms_norm(x, x.shape[-1:], x[0], _EPS),
        (3, width),
    )


def try_kernels(trials: Iterable[_Trial], dtype: torch.dtype, device: str) -> None:
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


def _gated_by_pytorch(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _rotation_trial(rotate: Callable[..., tuple[Tensor, Tensor]]) -> Callable[[Tensor], Tensor]:
    def function(x: Tensor) -> Tensor:
        angles = x[:, 0].detach()
        return torch.cat(rotate(x[:, 1:3], x[:, 3:], angles.cos(), angles.sin()), 1)

    return function


GATE = _Trial("a gate", SwiGLU.apply, _gated_by_pytorch, (3, 64))
ROTATION = _Trial(
    "a rotation", _rotation_trial(Rotary.apply), _rotation_trial(llama.apply_rotary_pos_emb), (2, 4, 3, 16)
)
