"""What of a model takes memory, from its configuration alone: shapes on the meta device."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from transformers import AutoModelForCausalLM, PretrainedConfig

from nemo_opd.distributed.layout import Layout
from nemo_opd.models.head import SOFT_CAPS
from nemo_opd.models.lora import NAME, Adapters, adapter_parameters, lora_layers

Shape = tuple[int, ...]
FP32 = 4
"""Bytes of a number."""
PROBED_ROWS = 1024
"""Enough for what a norm keeps once, such as a weight in fp32, to vanish beside what it keeps a row."""


@dataclass(frozen=True, slots=True)
class NormSize:
    """A norm of a decoder layer."""

    width: int
    """Numbers a token that pass through it."""
    on_stream: bool
    """It is on hidden states, which sequence parallelism cuts; else on heads, which tensor parallelism cuts."""
    saved_bytes: tuple[int, int]
    """What it keeps for backward of each number, computed in 2 bytes and in 4."""

    def saved(self, compute_bytes: int) -> int:
        """Bytes a token."""
        return self.width * self.saved_bytes[compute_bytes == 4]


@dataclass(frozen=True, slots=True)
class AdapterSize:
    """A and B beside a linear layer."""

    rank: int
    inputs: int
    outputs: int
    has_dropout: bool

    def saved(self, compute_bytes: int) -> int:
        """What a token leaves behind: A's output and, with dropout, its own copy of the input and what was kept."""
        return self.rank * compute_bytes + (self.inputs * (compute_bytes + 1) if self.has_dropout else 0)


@dataclass(frozen=True, slots=True)
class LayerSize:
    """A decoder layer."""

    shapes: tuple[Shape, ...]
    """Of its parameters."""
    hidden_size: int
    query_width: int
    """Heads times their width."""
    key_width: int
    """Key-value heads times their width."""
    num_heads: int
    mlp_width: int
    """Intermediate numbers a token, over all experts that a token is sent to."""
    num_experts: int
    """That a token is sent to; 0 where there are none."""
    is_gated: bool
    fused_keys: bool
    """Queries, keys and values come out of one matrix."""
    fused_gate: bool
    """Gate and up come out of one matrix."""
    window: int | None
    """Of its attention; None: all."""
    has_scores: bool
    """Attention forms every score, as eager attention does."""
    caps_scores: bool
    norms: tuple[NormSize, ...]
    adapters: tuple[AdapterSize, ...] = ()
    """Of its linear layers."""

    @property
    def trained_shapes(self) -> tuple[Shape, ...]:
        """Of adapters, where there are any, and else of everything."""
        return adapter_shapes(self.adapters) or self.shapes


@dataclass(frozen=True, slots=True)
class ModelSize:
    vocab_size: int
    hidden_size: int
    head_width: int
    """Numbers in a head's query, as many as its cosines and sines."""
    layers: tuple[LayerSize, ...]
    rest: tuple[Shape, ...]
    """Shapes of the parameters outside layers: embedding, final norm and, unless tied, the head."""
    final_norm: NormSize | None
    has_soft_cap: bool
    """The model caps its logits."""
    adapters: tuple[AdapterSize, ...] = ()
    """In layers and outside; where there are any, nothing else is trained."""

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return (*self.rest, *(shape for layer in self.layers for shape in layer.shapes))

    @property
    def trained_shapes(self) -> tuple[Shape, ...]:
        return adapter_shapes(self.adapters) or self.shapes

    @property
    def parameters(self) -> int:
        """Without adapters; tied ones once."""
        return numel(self.shapes)

    @property
    def trained_parameters(self) -> int:
        return numel(self.trained_shapes)

    @property
    def widest_layer(self) -> LayerSize:
        """The one with most parameters."""
        return max(self.layers, key=lambda layer: numel(layer.shapes))


def adapter_shapes(adapters: tuple[AdapterSize, ...]) -> tuple[Shape, ...]:
    return tuple(shape for each in adapters for shape in ((each.rank, each.inputs), (each.outputs, each.rank)))


def numel(shapes: tuple[Shape, ...]) -> int:
    return sum(map(prod, shapes))


def cut_numel(shapes: tuple[Shape, ...], tp: int) -> int:
    """Parameters of a tensor-parallel rank: matrices are cut, vectors are whole."""
    return sum(prod(shape) if len(shape) < 2 else -(-prod(shape) // tp) for shape in shapes)


def shard_numel(shapes: tuple[Shape, ...], layout: Layout) -> int:
    """Parameters that rank 0 keeps: FSDP2 gives each of its ranks ⌈rows / ranks⌉ rows of every parameter."""
    total = 0
    for shape in shapes:
        rows, columns = shape[0], prod(shape[1:])
        if len(shape) >= 2:
            rows = -(-rows // layout.tp)
        total += -(-rows // (layout.dp * layout.cp)) * columns
    return total


def model_size(config: PretrainedConfig, adapters: Adapters | None = None) -> ModelSize:
    """Exact in parameters; tied ones count once. What attention and MLP are like is read from `config`.

    Raises ModelError for adapters that do not fit the model.
    """
    with torch.device("meta"):
        return size_of(AutoModelForCausalLM.from_config(config), adapters)


def size_of(model: Any, adapters: Adapters | None = None) -> ModelSize:
    """Of a model on meta, to which the adapters are then attached. Raises ModelError as `model_size` does."""
    text = model.config.get_text_config()
    if adapters is not None:
        adapters.attach(model)
    layers = list(decoder_layers(model))
    in_layers = {id(parameter) for layer in layers for parameter in own_parameters(layer)}
    rest = tuple(tuple(p.shape) for p in own_parameters(model) if id(p) not in in_layers)
    norms = [module for module in model.base_model.children() if is_norm(module)]
    return ModelSize(
        vocab_size=text.vocab_size,
        hidden_size=text.hidden_size,
        head_width=head_width(text),
        layers=tuple(layer_size(layer, i, text, model.config) for i, layer in enumerate(layers)),
        rest=rest,
        final_norm=norm_size("", norms[-1], text) if norms else None,
        has_soft_cap=any(getattr(text, name, None) for name in SOFT_CAPS),
        adapters=adapter_sizes(model),
    )


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Without those of adapters."""
    added = {id(parameter) for _, parameter in adapter_parameters(module)}
    return [parameter for parameter in module.parameters() if id(parameter) not in added]


def adapter_sizes(module: nn.Module) -> tuple[AdapterSize, ...]:
    return tuple(adapter_size(layer) for _, layer in lora_layers(module))


def adapter_size(layer: Any) -> AdapterSize:
    (rank, inputs), outputs = layer.lora_A[NAME].weight.shape, len(layer.lora_B[NAME].weight)
    return AdapterSize(rank, inputs, outputs, isinstance(layer.lora_dropout[NAME], nn.Dropout))


def decoder_layers(model: Any) -> Iterator[nn.Module]:
    """The modules that FSDP2 gathers one at a time; of a model that names none, its longest list of modules."""
    names = set(model._no_split_modules or ())
    named = [module for module in model.modules() if type(module).__name__ in names]
    if named:
        return iter(named)
    lists = [list(module) for module in model.modules() if isinstance(module, nn.ModuleList)]
    return iter(max(lists, key=len, default=[model]))


def number(text: Any, *keys: str, default: int) -> int:
    """The first of these settings that there is; where layers differ in it, the largest."""
    given = next((value for key in keys if (value := getattr(text, key, None))), default)
    return int(max(given)) if isinstance(given, list | tuple) else int(given)


def num_heads(text: Any) -> int:
    return number(text, "num_attention_heads", default=1)


def num_key_heads(text: Any) -> int:
    return number(text, "num_key_value_heads", default=num_heads(text))


def head_width(text: Any) -> int:
    return number(text, "head_dim", default=text.hidden_size // num_heads(text))


def layer_size(layer: nn.Module, index: int, text: Any, config: Any) -> LayerSize:
    names = [name for name, _ in layer.named_parameters()]
    heads, width = num_heads(text), head_width(text)
    routed = any("expert" in name for name in names)
    num_experts = number(text, "num_experts_per_tok", "moe_topk", "top_k_experts", default=1) if routed else 0
    is_eager = getattr(config, "_attn_implementation", None) == "eager"
    return LayerSize(
        shapes=tuple(tuple(parameter.shape) for parameter in own_parameters(layer)),
        hidden_size=text.hidden_size,
        query_width=heads * width,
        key_width=num_key_heads(text) * width,
        num_heads=heads,
        mlp_width=mlp_width(text, num_experts),
        num_experts=num_experts,
        is_gated=any("gate" in name or "w3" in name for name in names),
        fused_keys=any("qkv" in name or "query_key_value" in name for name in names),
        fused_gate=not routed and any("gate_up" in name for name in names),
        window=window(text, index),
        has_scores=is_eager,
        caps_scores=is_eager and bool(getattr(text, "attn_logit_softcapping", None)),
        norms=tuple(norm_size(name, module, text) for name, module in layer.named_modules() if is_norm(module)),
        adapters=adapter_sizes(layer),
    )


def mlp_width(text: Any, num_experts: int) -> int:
    own = number(text, "intermediate_size", "ffn_dim", "n_inner", default=4 * text.hidden_size)
    if not num_experts:
        return own
    shared = number(text, "shared_expert_intermediate_size", default=0)
    return num_experts * number(text, "moe_intermediate_size", default=own) + shared


def window(text: Any, index: int) -> int | None:
    size = getattr(text, "sliding_window", None)
    kinds = getattr(text, "layer_types", None)
    if kinds is None or index >= len(kinds):
        slides = getattr(text, "use_sliding_window", True)
    else:
        slides = kinds[index] == "sliding_attention"
    return int(size) if size and slides else None


def is_norm(module: nn.Module) -> bool:
    weight = getattr(module, "weight", None)
    return "norm" in type(module).__name__.lower() and isinstance(weight, Tensor) and weight.dim() == 1


def norm_size(name: str, norm: Any, text: Any) -> NormSize:
    """`name` tells a norm of keys from one of queries."""
    own = len(norm.weight)
    is_of_head = own == head_width(text) != text.hidden_size
    heads = num_key_heads(text) if "k_" in name.rpartition(".")[2] else num_heads(text)
    saved = saved_bytes(norm, torch.bfloat16), saved_bytes(norm, torch.float32)
    return NormSize(own * heads if is_of_head else own, not is_of_head and own == text.hidden_size, saved)


def saved_bytes(norm: Any, dtype: torch.dtype) -> int:
    """What a norm keeps for backward of each number that passes through it: models differ in where they round.

    For one that takes more than hidden states, what most keep: its input in fp32 and its output before the weight.
    """
    storages: dict[int, int] = {}
    probe = copy.deepcopy(norm).to(dtype)
    rows = torch.empty(PROBED_ROWS, len(norm.weight), dtype=dtype, device="meta", requires_grad=True)

    def pack(tensor: Tensor) -> Tensor:
        if tensor.numel() >= rows.numel():
            storages[tensor.untyped_storage()._cdata] = tensor.numel() * tensor.itemsize
        kept.append(tensor)
        return tensor

    kept: list[Tensor] = []  # so that no storage's address is used twice
    try:
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            probe(rows)
    except (TypeError, RuntimeError):
        return 4 + dtype.itemsize
    return sum(storages.values()) // rows.numel()
