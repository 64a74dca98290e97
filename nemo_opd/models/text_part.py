"""Text part of multimodal models: configuration and weight names."""

import re
from typing import Any

from transformers import AutoConfig, PretrainedConfig

_SAME_LAYERS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Types of text parts without a causal language model in transformers → types with the same layers and weights.

For text only, rotary angles of three axes equal those of one axis: all axes have the same positions.
"""
_AXES = ("mrope_section", "mrope_interleaved")
NAMES = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
}
"""Patterns of weight names in files of multimodal models → prefixes in the text model."""


def text_part(config: PretrainedConfig) -> PretrainedConfig:
    """Return the configuration of a multimodal model's text part; return a text model's configuration unchanged."""
    text: Any = config.get_text_config()
    if text is config:
        return config
    # The multimodal configuration has these settings for all parts.
    for name in ("tie_word_embeddings", "quantization_config"):
        if hasattr(config, name):
            setattr(text, name, getattr(config, name))
    text.dtype = text.dtype or config.dtype
    if (kind := _SAME_LAYERS.get(text.model_type)) is not None:
        text = AutoConfig.for_model(kind, **_without_axes(text.to_dict()))
    text.architectures = None
    return text


def text_name(name: str) -> str:
    """Return the text model's name of a weight in a multimodal model's file; other names are returned unchanged."""
    for pattern, replacement in NAMES.items():
        name, number = re.subn(pattern, replacement, name)
        if number:
            break
    return name


def _without_axes(values: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration's values without its type and the assignment of rotary angles to axes."""
    rope = {key: value for key, value in (values.get("rope_parameters") or {}).items() if key not in _AXES}
    if rope.get("rope_type") == "mrope":
        rope["rope_type"] = "default"
    return {**{key: value for key, value in values.items() if key != "model_type"}, "rope_parameters": rope}
