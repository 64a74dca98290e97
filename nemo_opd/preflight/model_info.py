"""A model's size, tokenizer and limits, read before its weights are loaded."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerFast
from transformers.utils import is_flash_attn_2_available, is_flash_attn_3_available

from nemo_opd.alignment import Pieces, pieces_of
from nemo_opd.alignment.pieces import HOLE
from nemo_opd.config.model import Student
from nemo_opd.config.teacher import CrossTokenizerTeacher, ServedTeacher, Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import AlignmentError, ModelError
from nemo_opd.models.causal_model import SOFT_CAPS
from nemo_opd.models.folder import require_weights
from nemo_opd.models.fused_layers import check_fused_layers, is_known, is_norm
from nemo_opd.models.load import build_on_meta, load_config, tokenizer_of
from nemo_opd.models.lora import NAME, Adapters, adapter_parameters, lora_layers
from nemo_opd.models.parallelize import check_parallelism
from nemo_opd.models.stored_weights import check_weights
from nemo_opd.models.tensor_plan import decoder_layers
from nemo_opd.models.token_trials import require_causal
from nemo_opd.rollout.transformers_engine import max_positions
from nemo_opd.rotary import RotaryLimit, rotary_limit
from nemo_opd.teacher_cache.shard import read_manifest

Shape = tuple[int, ...]
_NO_LIMIT = 1 << 30
"""Tokens; longer than any text."""
_FLASH = {
    "flash_attention_2": (is_flash_attn_2_available, "flash-attn"),
    "flash_attention_3": (is_flash_attn_3_available, "flash-attn-3"),
}
"""Attention implementation → function that tells whether its package is installed, and the package."""
_loaded: dict[tuple[str, str | None], tuple[PreTrainedTokenizerFast, Pieces]] | None = None
"""Tokenizers by source and chat template, in a block of `tokenizers_loaded_once`."""


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Size, tokenizer and limits of a model."""

    size: ModelSize
    tokenizer: PreTrainedTokenizerFast
    pieces: Pieces
    vocab_size: int
    """Number of ids that both the tokenizer and the model have."""
    positions: int | None = None
    """Longest sequence of the model in tokens; None if its configuration sets no limit."""
    has_rotary_positions: bool = False
    """Whether the model still runs beyond `positions`, with poor predictions; learned positions end there."""
    rotary: RotaryLimit | None = None
    """Limit of rotary factors that depend on the longest text of a forward pass."""

    @property
    def computed_size(self) -> ModelSize:
        """Size of the model with a head of `vocab_size` rows, the ones that losses compute logits of."""
        return replace(self.size, vocab_size=self.vocab_size)

    def ids_missing_in(self, other: ModelInfo) -> NDArray[np.int64]:
        """Return the ids that the other tokenizer does not have, or the other model has no embedding for."""
        in_other = np.zeros(self.vocab_size, np.bool_)
        common = min(self.vocab_size, other.vocab_size)
        in_other[:common] = other.pieces.origin[:common] != HOLE
        return np.flatnonzero((self.pieces.origin[: self.vocab_size] != HOLE) & ~in_other)

    def longest_text(self, settings: Teacher) -> int:
        """Return the most tokens that a teacher reads of a text."""
        max_length = settings.max_length if isinstance(settings, CrossTokenizerTeacher) else None
        return max_length or self.positions or _NO_LIMIT


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


def read_model_info(settings: Student | Teacher, key: str, device: str) -> ModelInfo:
    """Read a model's configuration and tokenizer; of a served teacher, its tokenizer and its servers' limits.

    Raises ModelError if one of them cannot be read, they do not belong together, the model is not causal, or
    `parallelism`, `attn_implementation` or `fused_layers` does not fit; EndpointError as `check_endpoint` does.
    """
    if not has_configuration(settings):
        return _tokenizer_and_limit(settings, key)
    config = load_config(settings.reference, key=f"{key}.model")
    check_parallelism(config, settings.parallelism, device, key=f"{key}.parallelism")
    lora = settings.lora if isinstance(settings, Student) else None
    adapters = None if lora is None else Adapters(lora, settings.reference, seed=0)
    _check_attention(settings, key, device)
    model = build_on_meta(
        config, settings.reference, key=f"{key}.model", attn_implementation=settings.attn_implementation
    )
    require_causal(config, settings.reference, key=f"{key}.model")
    if isinstance(settings, Student) or settings.is_computed:
        require_weights(settings.reference, key=f"{key}.model")
        check_fused_layers(model, settings.fused_layers, device, key=key)
        check_weights(model, settings.reference, key=f"{key}.model")
    size = size_of(model, adapters)
    if not size.layers:
        raise ModelError(f"{key}.model={settings.reference}: its config.json says 0 layers; copy the file there again")
    tokenizer, pieces = _read_tokenizer(settings, key)
    name, source = settings.tokenizer_source
    # Special tokens need no embedding: Gemma-3-1B shares its tokenizer, with its image token, with multimodal models.
    no_embedding = slice(size.vocab_size, None)
    if not np.all(pieces.is_special[no_embedding] | (pieces.origin[no_embedding] == HOLE)):
        raise ModelError(
            f"{key}.{name}={source}: its tokenizer has ids up to {pieces.vocab_size - 1}, but {settings.reference} has "
            f"{size.vocab_size} token embeddings; set {key}.tokenizer to the model's tokenizer"
        )
    text = config.get_text_config()
    return ModelInfo(
        size,
        tokenizer,
        pieces,
        min(pieces.vocab_size, size.vocab_size),
        positions=max_positions(config),
        has_rotary_positions=bool(getattr(text, "rope_parameters", None)),
        rotary=rotary_limit(text.to_dict()),
    )


def has_configuration(settings: Student | Teacher) -> bool:
    """Return whether the model's configuration can be read: not for servers and caches of their answers."""
    if isinstance(settings, Student) or settings.is_computed:
        return True
    return settings.cache is not None and not read_manifest(settings.cache).is_served


def tokenizer_info(settings: Teacher, key: str) -> ModelInfo:
    """Read the tokenizer of a teacher without a configuration, whose model is assumed to have all of its ids.

    Raises ModelError if it cannot be read.
    """
    try:
        tokenizer, pieces = _read_tokenizer(settings, key)
    except ModelError as error:
        is_served = settings.served is not None or isinstance(settings, ServedTeacher)
        if not is_served or settings.tokenizer is not None:
            raise
        raise ModelError(
            f"{error}; if only the servers use the name {settings.reference}, set {key}.tokenizer to the folder or "
            "hub name of its tokenizer"
        ) from error
    size = ModelSize(pieces.vocab_size, hidden_size=0, layers=(), rest=(), has_soft_cap=False)
    return ModelInfo(size, tokenizer, pieces, pieces.vocab_size)


def _tokenizer_and_limit(settings: Student | Teacher, key: str) -> ModelInfo:
    assert not isinstance(settings, Student)
    info = tokenizer_info(settings, key)
    if settings.served is None:
        assert settings.cache is not None
        return replace(info, positions=read_manifest(settings.cache).positions)
    from nemo_opd.served.answers import TEXTS, check_endpoint  # imports what only runs need

    ordinary = np.flatnonzero(~info.pieces.is_special & (info.pieces.origin != HOLE))
    limit = check_endpoint(
        settings.served,
        settings.reference,
        key=key,
        vocab_size=info.vocab_size,
        token=int(ordinary[-1]),
        texts=[info.tokenizer(text)["input_ids"] for text in TEXTS],
    )
    return replace(info, positions=limit)


@contextmanager
def tokenizers_loaded_once() -> Iterator[None]:
    """Read each tokenizer once in the block, as the largest take seconds."""
    global _loaded
    _loaded = {}
    try:
        yield
    finally:
        _loaded = None


def _read_tokenizer(settings: Student | Teacher, key: str) -> tuple[PreTrainedTokenizerFast, Pieces]:
    name, source = settings.tokenizer_source
    identity = source, settings.chat_template
    if _loaded is not None and identity in _loaded:
        return _loaded[identity]
    tokenizer = tokenizer_of(settings, key=key)
    try:
        result = tokenizer, pieces_of(tokenizer)
    except AlignmentError as error:
        raise ModelError(f"{key}.{name}={source}: {error}") from error
    if _loaded is not None:
        _loaded[identity] = result
    return result


def _check_attention(settings: Student | Teacher, key: str, device: str) -> None:
    """Raise ModelError for flash attention that the device, the dtype or a missing package rules out."""
    name = settings.attn_implementation
    if name not in _FLASH:
        return
    is_installed, package = _FLASH[name]
    if device == "cpu":
        reason = f"it needs a GPU, and cluster.device is {device}"
    elif settings.dtype == "float32":
        reason = f"it supports only bfloat16 and float16, and {key}.dtype is float32"
    elif not is_installed():
        reason = f"the package {package} is not installed"
    else:
        return
    raise ModelError(f"{key}.attn_implementation={name}: {reason}; leave it out to use PyTorch's attention")


def model_size(config: PretrainedConfig, adapters: Adapters | None = None) -> ModelSize:
    """Build the model on meta and return its size. Raises ModelError if the adapters do not fit."""
    with torch.device("meta"):
        return size_of(AutoModelForCausalLM.from_config(config), adapters)


def size_of(model: Any, adapters: Adapters | None = None) -> ModelSize:
    """Attach the adapters to a model on meta and return its size. Raises ModelError if they do not fit."""
    text = model.config.get_text_config()
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
