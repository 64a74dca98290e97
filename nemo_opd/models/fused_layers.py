"""Elementwise parts of decoder layers by few kernels: norms, rotary embeddings, gated activations.

A part is replaced where transformers' code of it is that of Llama or Phi-3, whatever the family, in one model alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.activations import SiLUActivation
from transformers.models.llama import modeling_llama as llama
from transformers.models.phi3 import modeling_phi3 as phi3

from nemo_opd.errors import ModelError
from nemo_opd.kernels import launch
from nemo_opd.kernels.layers import RMSNorm, Rotary, SwiGLU
from nemo_opd.models.layer_trials import GATE, ROTATION, Trial, norm_of, try_kernels

_HALF = (torch.bfloat16, torch.float16)
_DTYPES = (*_HALF, torch.float32)
_ROTATE = "apply_rotary_pos_emb"
_WIDEST = 2**15
"""Numbers of a row that a program of a norm can hold."""


@dataclass(frozen=True, slots=True)
class _Part:
    """A module that is known."""

    module: nn.Module
    forward: Callable[..., Any]
    """Its method in the place of its class's."""
    trial: Trial


def fuse_layers(
    model: PreTrainedModel, wanted: bool | Literal["auto"], dtype: torch.dtype, device: str, *, key: str
) -> None:
    """Replace elementwise parts of a model, which may be on meta and is not yet cut over ranks.

    wanted: `fused_layers` of its settings. dtype: of its computation on `device`. Where a trial of the kernels fails it
    warns, or with `True` raises ModelError naming `key`, as does what `check_fused_layers` refuses.
    """
    check_fused_layers(model, wanted, device, key=key)
    if not may_fuse(wanted, dtype, device):
        return
    parts = list(_parts(model))
    try:
        try_kernels({(part.trial.name, part.trial.shape): part.trial for part in parts}.values(), dtype, device)
    except launch.KernelError as error:
        if wanted is True:
            raise ModelError(f"{key}.fused_layers=true: {error}") from error
        warnings.warn(f"{key}: {error}; PyTorch computes its layers, more slowly", stacklevel=2)
        return
    _replace(parts)


def check_fused_layers(model: nn.Module, wanted: bool | Literal["auto"], device: str, *, key: str) -> None:
    """Raise ModelError, naming `key`, where parts must be replaced and there are no kernels or no such parts."""
    if wanted is not True:
        return
    if not launch.is_supported(device):
        why = f"Triton needs a GPU, and the device is {device}"
    elif next(_parts(model), None) is None:
        why = f"no part of the layers of {type(model).__name__} is known"
    else:
        return
    raise ModelError(f"{key}.fused_layers=true: {why}; leave it out, and PyTorch computes what has no kernels")


def may_fuse(wanted: bool | Literal["auto"], dtype: torch.dtype, device: str) -> bool:
    """Return whether parts of a model's layers are replaced, if there are any and Triton can compile the kernels."""
    dtypes = _HALF if wanted == "auto" else _DTYPES
    return bool(wanted) and dtype in dtypes and launch.is_supported(device)


def replace_parts(model: nn.Module) -> None:
    """Replace elementwise parts without trying their kernels."""
    _replace(_parts(model))


def is_known(layer: nn.Module) -> bool:
    """Return whether all norms of a decoder layer, and its MLP, are replaced."""
    known = {type(part.module) for part in _parts(layer)}
    needed = {type(module) for module in layer.modules() if is_norm(module) or type(module).__name__.endswith("MLP")}
    return bool(needed) and needed <= known


def is_norm(module: nn.Module) -> bool:
    """Return whether a module is a norm, by its name."""
    return "norm" in type(module).__name__.lower()


def _replace(parts: Iterable[_Part]) -> None:
    for part in parts:
        part.module.forward = MethodType(part.forward, part.module)


def _parts(model: nn.Module) -> Iterator[_Part]:
    for module in model.modules():
        forward = type(module).forward
        if "forward" in vars(module):  # replaced by others
            continue
        if _is_like(forward, llama.LlamaRMSNorm.forward):
            weight: Any = module.weight
            if len(weight) <= _WIDEST:
                yield _Part(module, _norm, norm_of(len(weight)))
        elif _is_like(forward, llama.LlamaMLP.forward) and _is_silu(module.act_fn):
            yield _Part(module, _gated, GATE)
        elif _is_like(forward, phi3.Phi3MLP.forward) and _is_silu(module.activation_fn):
            yield _Part(module, _gated_together, GATE)
        elif (rotate := _rotation(forward)) is not None:
            yield _Part(module, _with_rotation(forward, rotate), ROTATION)


def _is_like(function: Any, known: Any) -> bool:
    """Return whether two functions have the same code, up to texts such as docstrings."""
    return _code(known) == _code(function)


def _code(function: Any) -> tuple[Any, ...] | None:
    code = getattr(function, "__code__", None)  # what the package kernels has replaced has none
    if code is None:
        return None
    return code.co_code, code.co_names, tuple(each for each in code.co_consts if not isinstance(each, str))


def _is_silu(activation: object) -> bool:
    return isinstance(activation, nn.SiLU | SiLUActivation)


def _rotation(forward: Any) -> Callable[..., Any] | None:
    """Return the rotation that an attention's forward calls, if it is known."""
    code = getattr(forward, "__code__", None)
    if code is None or _ROTATE not in code.co_names:
        return None
    rotate = forward.__globals__.get(_ROTATE)
    is_known = _is_like(rotate, llama.apply_rotary_pos_emb) or _is_like(rotate, phi3.apply_rotary_pos_emb)
    if not is_known or not _is_like(rotate.__globals__.get("rotate_half"), llama.rotate_half):
        return None
    found: Callable[..., Any] = rotate
    return found


def _with_rotation(forward: Any, plain: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention's forward that rotates by a kernel. It is a name in its module, which stays as it is."""

    def rotate(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> Any:
        width, is_table = query.shape[-1], cos.dim() == 3 and cos.shape == sin.shape and not cos.requires_grad
        is_partial = is_table and cos.shape[-1] < width and _is_like(plain, phi3.apply_rotary_pos_emb)
        if unsqueeze_dim != 1 or not is_table or not (cos.shape[-1] == width or is_partial):
            return plain(query, key, cos, sin, unsqueeze_dim)
        return Rotary.apply(query, key, cos, sin) if _suit(query, key, cos, sin) else plain(query, key, cos, sin)

    made = FunctionType(
        forward.__code__,
        {**forward.__globals__, _ROTATE: rotate},
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    made.__kwdefaults__ = forward.__kwdefaults__
    return made


def _norm(self: Any, hidden_states: Tensor) -> Tensor:
    if not _suit(hidden_states, self.weight):
        return type(self).forward(self, hidden_states)
    return RMSNorm.apply(hidden_states, self.weight, self.variance_epsilon)


def _gated(self: Any, x: Tensor) -> Tensor:
    gate, up = self.gate_proj(x), self.up_proj(x)
    found = SwiGLU.apply(gate, up) if _suit(gate, up) else self.act_fn(gate) * up
    return self.down_proj(found)


def _gated_together(self: Any, hidden_states: Tensor) -> Tensor:
    both = self.gate_up_proj(hidden_states)
    if _suit(both):
        return self.down_proj(SwiGLU.apply(both))
    gate, up = both.chunk(2, dim=-1)
    return self.down_proj(up * self.activation_fn(gate))


def _suit(*tensors: Tensor) -> bool:
    """Return whether kernels take these tensors; PyTorch takes all others, such as those of an offloaded model."""
    first = tensors[0]
    is_plain = first.dtype in _DTYPES and first.numel() > 0 and launch.is_supported(first.device.type)
    return is_plain and all(each.dtype == first.dtype and not isinstance(each, DTensor) for each in tensors)
