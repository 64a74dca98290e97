"""Models of the real-model benchmark: the original, copies with fewer layers, copies with another tokenizer."""

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

_END, _PAD = "<|end_of_text|>", "<|pad|>"
_QUANTISED = "quantization_config"


def write_original(source: Path, folder: Path) -> None:
    """Write the decoder of a Hugging Face folder in bfloat16, with its tokenizer."""
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    write_model(model, AutoTokenizer.from_pretrained(source), folder)


def with_single_digits(tokenizer: PreTrainedTokenizerFast) -> PreTrainedTokenizerFast:
    """Give a tokenizer that was read from GGUF the pre-tokenizer of SmolLM2, which GGUF names and transformers drops:
    every digit is a token, and no space is merged with one.
    """
    digits = pre_tokenizers.Digits(individual_digits=True)
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, byte_level])
    return tokenizer


def write_pruned(original: Path, keep: int, folder: Path) -> None:
    """Write a copy with `keep` of the decoder layers: the first, the last, and others at equal distances."""
    model = AutoModelForCausalLM.from_pretrained(original, dtype=torch.float32)
    kept = kept_layers(model.config.num_hidden_layers, keep)
    model.model.layers = torch.nn.ModuleList(model.model.layers[i] for i in kept)
    for place, layer in enumerate(model.model.layers):
        layer.self_attn.layer_idx = place
    model.config.num_hidden_layers = keep
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = [model.config.layer_types[i] for i in kept]
    write_model(model, AutoTokenizer.from_pretrained(original), folder)


def kept_layers(num_layers: int, keep: int) -> list[int]:
    return [round(i * (num_layers - 1) / max(1, keep - 1)) for i in range(keep)]


def write_tokenizer(texts: list[str], vocab_size: int, folder: Path) -> None:
    """Train a byte-level BPE tokenizer on the texts, with a token for the end of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[_END, _PAD], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_END, pad_token=_PAD)
    fast.save_pretrained(folder)


def write_model(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write a plain model of the same class in bfloat16, without the settings of its quantisation."""
    settings = model.config.to_dict()
    settings.pop(_QUANTISED, None)
    settings.pop("_name_or_path", None)
    plain = type(model)(type(model.config)(**settings))
    plain.load_state_dict(model.state_dict())
    plain.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
