"""Parameter counts and dimensions of a model for estimates of memory and FLOPs, read from modules on meta."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from nemo_opd.distributed.layout import Layout
from nemo_opd.models.decoder_layers import decoder_layers
from nemo_opd.models.fused_layers import is_known, is_norm
from nemo_opd.models.head import SOFT_CAPS
from nemo_opd.models.lora import NAME, Adapters, adapter_parameters, lora_layers
from nemo_opd.models.tensor_plan import tensor_parts

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LayerSize:
    """A decoder layer."""

    shapes: tuple[Shape, ...]
    """Shapes of its parameters."""
    hidden_size: int
    query_width: int
    """Query heads × head width."""
    key_width: int
    """Key-value heads × head width."""
    num_experts: int
    """Experts per token; 0 for a dense layer."""
    window: int | None
    """Length of the sliding attention window, or None with full attention."""
    norms: int
    """Elements per token that pass through norms."""
    score_heads: int
    """Heads whose attention scores are materialised: all with eager attention, else 0."""
    is_known: bool
    """Whether `fused_layers` can replace all norms and the MLP."""
    adapters: tuple[Shape, ...] = ()
    """Shapes of the adapters' matrices: A, B, A, B, …"""
    dropped: int = 0
    """Elements per token that pass through the adapters' dropout."""

    @property
    def trained_shapes(self) -> tuple[Shape, ...]:
        return self.adapters or self.shapes

    @property
    def active_weights(self) -> int:
        """Matrix weights that multiply one token; 3-D parameters are experts, and only the routed ones count."""
        matrices = [shape for shape in self.shapes if len(shape) > 1]
        return sum(prod(shape[1:]) * self.num_experts if len(shape) == 3 else prod(shape) for shape in matrices)


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A model's parameters and dimensions."""

    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSize, ...]
    rest: tuple[Shape, ...]
    """Shapes of the parameters outside the layers: embedding, final norm and, unless tied, the head."""
    has_soft_cap: bool
    """Whether the model soft-caps its logits."""
    tensor_parts: int = 1
    """Number that `tp` must divide."""
    adapters: tuple[Shape, ...] = ()
    """Shapes of all adapters; with any, nothing else is trained."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.rest, *(shape for layer in self.layers for shape in layer.shapes))

    @property
    def trained_shapes(self) -> tuple[Shape, ...]:
        return self.adapters or self.shapes

    @property
    def parameters(self) -> int:
        """Number of parameters without adapters; tied ones count once."""
        return numel(self.shapes)

    @property
    def trained_parameters(self) -> int:
        return numel(self.trained_shapes)


def numel(shapes: tuple[Shape, ...]) -> int:
    return sum(map(prod, shapes))


def cut_numel(shapes: tuple[Shape, ...], tp: int) -> int:
    """Return the number of parameters on a tensor-parallel rank: matrices are cut, vectors replicated."""
    return sum(prod(shape) if len(shape) < 2 else -(-prod(shape) // tp) for shape in shapes)


def shard_numel(shapes: tuple[Shape, ...], layout: Layout) -> int:
    """Return the number of parameters on rank 0: FSDP2 gives it ⌈rows / ranks⌉ rows of every parameter."""
    total = 0
    for rows, *columns in shapes:
        rows = -(-rows // layout.tp) if columns else rows
        total += -(-rows // layout.num_shards) * prod(columns)
    return total


def model_size(config: PretrainedConfig, adapters: Adapters | None = None) -> ModelSize:
    """Build the model on meta and return its size. Raises ModelError if the adapters do not fit."""
    with torch.device("meta"):
        return size_of(AutoModelForCausalLM.from_config(config), adapters)


def size_of(model: Any, adapters: Adapters | None = None) -> ModelSize:
    """Attach the adapters to a model on meta and return its size. Raises ModelError if they do not fit."""
    text, parts = model.config.get_text_config(), tensor_parts(model)
    if adapters is not None:
        adapters.attach(model)
    layers = _decoder_layers(model)
    in_layers = {id(parameter) for layer in layers for parameter in layer.parameters()}
    return ModelSize(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        layers=tuple(_layer_size(layer, i, model.config) for i, layer in enumerate(layers)),
        rest=tuple(tuple(p.shape) for p in _base_parameters(model) if id(p) not in in_layers),
        has_soft_cap=any(getattr(text, name, None) for name in SOFT_CAPS),
        tensor_parts=parts,
        adapters=_adapter_shapes(model),
    )


def _base_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters without adapters."""
    adapters = {id(parameter) for _, parameter in adapter_parameters(module)}
    return [parameter for parameter in module.parameters() if id(parameter) not in adapters]


def _adapter_shapes(module: nn.Module) -> tuple[Shape, ...]:
    return tuple(tuple(parameter.shape) for _, parameter in adapter_parameters(module))


def _decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """Return the modules that FSDP2 gathers one at a time; the longest ModuleList if the model names no layers."""
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return decoder_layers(model) or max(lists, key=len, default=[model])


def _layer_size(layer: nn.Module, index: int, config: Any) -> LayerSize:
    text = config.get_text_config()
    heads = _number(text, "num_attention_heads", default=1)
    key_heads = _number(text, "num_key_value_heads", default=heads)
    width = _number(text, "head_dim", default=text.hidden_size // heads)
    norms = [
        len(weight)
        for module in layer.modules()
        if is_norm(module) and isinstance(weight := getattr(module, "weight", None), Tensor) and weight.dim() == 1
    ]
    head_norms = (heads + key_heads) * width if set(norms) - {text.hidden_size} else 0
    is_routed = any("expert" in name for name, _ in layer.named_parameters())
    adapters = _adapter_shapes(layer)
    has_dropout = any(isinstance(lora.lora_dropout[NAME], nn.Dropout) for _, lora in lora_layers(layer))
    return LayerSize(
        shapes=tuple(tuple(parameter.shape) for parameter in _base_parameters(layer)),
        hidden_size=text.hidden_size,
        query_width=heads * width,
        key_width=key_heads * width,
        num_experts=_number(text, "num_experts_per_tok", "moe_topk", "top_k_experts", default=1) if is_routed else 0,
        window=_window(text, index),
        norms=sum(size for size in norms if size == text.hidden_size) + head_norms,
        score_heads=heads if getattr(config, "_attn_implementation", None) == "eager" else 0,
        is_known=is_known(layer),
        adapters=adapters,
        dropped=sum(inputs for _, inputs in adapters[::2]) if has_dropout else 0,
    )


def _number(text: Any, *keys: str, default: int) -> int:
    """Return the first of these config keys that is set; the largest value if it is a list per layer."""
    setting = next((value for key in keys if (value := getattr(text, key, None))), default)
    return int(max(setting)) if isinstance(setting, list | tuple) else int(setting)


def _window(text: Any, index: int) -> int | None:
    size, kinds = getattr(text, "sliding_window", None), getattr(text, "layer_types", None) or ()
    slides = kinds[index] == "sliding_attention" if index < len(kinds) else getattr(text, "use_sliding_window", True)
    return int(size) if size and slides else None
