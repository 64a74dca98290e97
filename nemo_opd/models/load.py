"""Loading of models and tokenizers from a folder, the hub, or the demo; of multimodal models, their text part."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from nemo_opd.config.model import Model
from nemo_opd.distributed.collectives import NotFinite
from nemo_opd.errors import ModelError
from nemo_opd.models.adapter_folder import resolve, resolve_tokenizer
from nemo_opd.models.folder import (
    check_folder,
    needs_sentencepiece,
    num_tensors,
    read_template,
    reason,
    safetensors_files,
)
from nemo_opd.models.quantised import dequantised, quantisation

_SOME_LAYERS = 512
"""Number of layers that no real model exceeds and that can be built quickly."""
_SAME_LAYERS = {
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
"""Types of text parts without a causal language model in transformers → types with the same layers and weights.

For text only, rotary angles of three axes equal those of one axis: all axes have the same positions.
"""
_MOST_GROWTH = 1_000
"""Most characters that the replacements of a tokenizer may make of one."""
_AXES = ("mrope_section", "mrope_interleaved")
_TEXT_NAMES = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
}
"""Patterns of weight names in files of multimodal models → prefixes in the text model."""


def load_tokenizer(reference: str, *, key: str) -> PreTrainedTokenizerFast:
    """Load a tokenizer. Raises ModelError, naming `key`, if it cannot be loaded or has no fast backend."""
    source = resolve_tokenizer(reference, key=key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        tokenizer("")  # the tokens that begin and end a text may be wrong
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # tokenizers, the hub and transformers raise their own; a panic is no Exception
        if needs_sentencepiece(Path(source)):
            raise ModelError(
                f"{key}={reference}: the folder has a SentencePiece model (tokenizer.model) and no tokenizer.json, and "
                "the package sentencepiece, which reads it, is not installed; run `pip install sentencepiece`, or "
                "convert it where that is installed: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
            ) from error
        is_folder = Path(source).exists()
        problem = "" if is_folder else f"there is no folder {Path(reference).absolute()}, and from the hub "
        raise ModelError(
            f"{key}={reference}: {problem}no tokenizer could be loaded ({reason(error)}); give a folder with "
            "tokenizer.json, or a hub name that this machine can reach"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{key}={reference}: {type(tokenizer).__name__} has no fast backend, from which token bytes are read; "
            "convert it to a tokenizer.json"
        )
    for name in ("normalizer", "decoder"):
        part = getattr(tokenizer.backend_tokenizer, name)
        if part is not None and _growth(json.loads(part.__getstate__())) > _MOST_GROWTH:
            raise ModelError(
                f"{key}={reference}: the {name} in tokenizer.json may make more than {_MOST_GROWTH:,} characters of "
                "one, as no tokenizer for text does; use the tokenizer of another source"
            )
    return tokenizer


def _growth(part: Any) -> float:
    """Return an upper bound on the characters that a normalizer's or decoder's replacements make of one.

    A replacement applies to the result of an earlier one if all characters of its pattern are in it.
    """
    replacements = list(_replacements(part))
    growths: list[float] = []
    for k, (characters, _, growth) in enumerate(replacements):
        earlier = [growths[i] for i, (_, content, _) in enumerate(replacements[:k]) if characters <= set(content)]
        growths.append(max(earlier, default=1.0) * growth)
    return max(growths, default=1.0)


def _replacements(part: Any) -> Iterator[tuple[set[str], str, float]]:
    """Yield each replacement in order: its pattern's characters, none for a regular expression; its result; growth."""
    if isinstance(part, dict) and part.get("type") == "Replace":
        text, expression = part["pattern"].get("String"), part["pattern"].get("Regex", "")
        # Content is added beside every character if a pattern matches the empty text.
        is_empty = not text and (text is not None or re.search(r"[*?|^$]|\\[bBAzZG]|\{0", expression))
        growth = len(part["content"]) + 1 if is_empty else len(part["content"]) / len(text or "x")
        yield set(text or ""), part["content"], max(1.0, growth)
    elif isinstance(part, dict | list):
        for item in part.values() if isinstance(part, dict) else part:
            yield from _replacements(item)


def tokenizer_of(settings: Model, *, key: str) -> PreTrainedTokenizerFast:
    """Load a model's tokenizer with the chat template of the settings. Raises ModelError naming a key below `key`."""
    name, source = settings.tokenizer_source
    tokenizer = load_tokenizer(source, key=f"{key}.{name}")
    if settings.chat_template is not None:
        tokenizer.chat_template = read_template(settings.chat_template, key=f"{key}.chat_template")
    return tokenizer


def load_config(reference: str, *, key: str) -> PretrainedConfig:
    """Load the configuration of a causal language model, or of a multimodal model's text part, and check its folder.

    Raises ModelError naming `key`.
    """
    return _read_config(reference, key=key)[0]


def _read_config(reference: str, *, key: str) -> tuple[PretrainedConfig, bool]:
    """Return the configuration as `load_config` does, and whether it is a multimodal model's text part."""
    check_folder(reference, key=key)
    source = resolve(reference, key=key)
    try:
        full_config: PretrainedConfig = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as error:  # the hub and transformers each raise their own
        raise ModelError(
            f"{key}={reference}: no model configuration could be read ({reason(error)}); give a folder in Hugging Face "
            "form, of an architecture that transformers has, or a hub name that this machine can reach"
        ) from error
    config = text_part(full_config)
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{key}={reference}: {config.model_type} is not a causal language model; name a model that continues text"
        )
    if config is not full_config and getattr(config, "quantization_config", None) is not None:
        raise ModelError(
            f"{key}={reference}: {full_config.model_type} reads more than text and is quantised, so its text part "
            "cannot be loaded alone; name the unquantised model"
        )
    if "/" in str(config._attn_implementation):  # transformers would fetch the code from the hub and run it
        raise ModelError(
            f"{key}={reference}: its config.json asks for the attention {config._attn_implementation!r}, which is code "
            "from the hub; take attn_implementation out of the file"
        )
    _check_depth(config, reference, key=key)
    return config, config is not full_config


def _check_depth(config: PretrainedConfig, reference: str, *, key: str) -> None:
    """Raise ModelError for more layers than the files have tensors, which would take too long to build."""
    layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    folder = Path(resolve(reference))
    if not isinstance(layers, int) or layers <= _SOME_LAYERS or not folder.is_dir():
        return
    tensors = sum(map(num_tensors, safetensors_files(folder)))
    if layers > (tensors or _SOME_LAYERS):
        why = f"its weights are {tensors} tensors" if tensors else "no model has that many"
        raise ModelError(
            f"{key}={reference}: its config.json says {layers} layers, but {why}; copy the file there again"
        )


def stored_dtype(reference: str, *, key: str) -> torch.dtype:
    """Return the weights' dtype from a model's configuration, by default fp32. Raises ModelError."""
    dtype = load_config(reference, key=key).dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def compute_dtype(name: str, device: str) -> torch.dtype:
    """Return the torch dtype of a setting; `auto` is bfloat16 on CUDA and float32 on CPU."""
    if name == "auto":
        return torch.bfloat16 if device == "cuda" else torch.float32
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def build_on_meta(
    config: PretrainedConfig, reference: str, *, key: str, attn_implementation: str | None = None, **options: Any
) -> PreTrainedModel:
    """Build the model on meta, without its weights. Raises ModelError, naming `key`, if it cannot be built."""
    if attn_implementation is not None:
        options["attn_implementation"] = attn_implementation
    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except Exception as error:  # architectures raise their own errors for sizes that do not fit
        attention = "" if attn_implementation is None else f" and with attn_implementation={attn_implementation}"
        raise ModelError(
            f"{key}={reference}: no model can be built as its config.json says{attention} ({reason(error)}); copy the "
            f"file there again, {'leave attn_implementation out, ' if attention else ''}or name another model"
        ) from error
    return model


def load_model(
    reference: str,
    dtype: torch.dtype,
    *,
    key: str,
    attn_implementation: str | None = None,
    quantised_on: str | None = None,
) -> PreTrainedModel:
    """Load a complete causal language model on the CPU in `dtype`.

    attn_implementation: a name of transformers, by default the model's. quantised_on: device on which quantised weights
    stay quantised; by default they are dequantised. Raises ModelError naming `key` if weights are unreadable or
    missing; transformers would initialise missing weights at random.
    """
    options: dict[str, Any] = {} if attn_implementation is None else {"attn_implementation": attn_implementation}
    config, is_part = _read_config(reference, key=key)
    if is_part:
        options["key_mapping"] = _TEXT_NAMES
    is_quantised = quantisation(config) is not None
    if is_quantised:
        if quantised_on is None:
            config = dequantised(config)
        else:
            options["device_map"] = {"": quantised_on}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            resolve(reference), config=config, dtype=dtype, output_loading_info=True, trust_remote_code=False, **options
        )
    except Exception as error:  # safetensors, pickle and transformers each raise their own
        raise unreadable(reference, error, key=key) from error
    model: PreTrainedModel = loaded[0]
    if is_part:  # so that names are not converted back when the model is saved
        model._weight_conversions = None  # type: ignore[assignment]
    check_nothing_missing(reference, sorted(loaded[1]["missing_keys"]), key=key)
    if is_quantised and quantisation(model.config) is None:  # was dequantised in the precision of its scales
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
    return model


def unreadable(reference: str, error: BaseException, *, key: str) -> ModelError:
    return ModelError(
        f"{key}={reference}: the weights could not be loaded ({reason(error)}); copy them there again, or name "
        "another model"
    )


def check_nothing_missing(reference: str, missing: list[str], *, key: str) -> None:
    """Raise ModelError, naming `key`, if any of the model's weights are missing in its folder."""
    if missing:
        raise ModelError(
            f"{key}={reference}: {len(missing)} weights are missing ({', '.join(missing[:3])}); name a folder with all "
            "weights of its config.json"
        )


def not_finite(reference: str, values: NotFinite, dtype: torch.dtype, *, key: str) -> ModelError:
    name = str(dtype).removeprefix("torch.")
    fp16_hint = f"; {name} overflows at 65,504, so try {key.removesuffix('.model')}.dtype=bfloat16"
    return ModelError(
        f"{key}={reference}: {values} in {name}, and a model computes nothing with them; copy the weights there again, "
        f"or name another model{fp16_hint if dtype == torch.float16 else ''}"
    )


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
    for pattern, replacement in _TEXT_NAMES.items():
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
