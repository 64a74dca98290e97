"""Fused kernels for the elementwise parts of decoder layers: norms, rotary embeddings, gated activations.

A module is replaced if its code in transformers equals Llama's or Phi-3's, whatever the model family. Only the given
model's modules change, not their classes.
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
"""Maximum row width of the norm kernel."""


@dataclass(frozen=True, slots=True)
class _Part:
    """Module with a fused replacement."""

    module: nn.Module
    forward: Callable[..., Any]
    """Replacement of the class's method."""
    trial: Trial


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
    except launch.KernelError as error:
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


def _replace(parts: Iterable[_Part]) -> None:
    for part in parts:
        part.module.forward = MethodType(part.forward, part.module)


def _parts(model: nn.Module) -> Iterator[_Part]:
    for module in model.modules():
        forward = type(module).forward
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
