"""Tiny models of many families with random weights, and tokenizers of both kinds, written once to a folder."""

from copy import deepcopy
from dataclasses import astuple, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PhiConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    Qwen2Config,
    Qwen3Config,
)

from tests import tokenizers_fixture

HIDDEN, HEADS, INTERMEDIATE = 24, 6, 36
"""Two and three ranks divide the number of heads and the intermediate size."""
HEAD_DIM = {"head_dim": 8}
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
FAMILIES: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, HEAD_DIM),
    "gemma2": (Gemma2Config, HEAD_DIM),
    "gemma3": (Gemma3TextConfig, HEAD_DIM | SLIDING),
    "phi": (PhiConfig, {"qk_layernorm": True}),
    "phi3": (Phi3Config, {}),
    "olmo2": (Olmo2Config, {}),
}
SOFT_CAPPED = ("gemma2", "gemma3")
MORE = "_and_one"


@cache
def tokenizer(name: str) -> PreTrainedTokenizerBase:
    """Train a tokenizer: bytes_* are byte-level BPEs, pieces_* are BPEs with byte fallback, MORE adds a token."""
    if name.endswith(MORE):
        wider = deepcopy(tokenizer(name.removesuffix(MORE)))
        wider.add_special_tokens({"additional_special_tokens": ["<|image|>"]})
        return wider
    return {
        "bytes_400": lambda: tokenizers_fixture.byte_level(400),
        "bytes_340": lambda: tokenizers_fixture.byte_level(340, tokenizers_fixture.DIGITS_ONE_BY_ONE, "</s>", ()),
        "pieces_480": lambda: tokenizers_fixture.sentencepiece(480),
        "pieces_440": lambda: tokenizers_fixture.sentencepiece(440, dummy_prefix=True),
    }[name]()


TOKENIZERS = ("bytes_400", "bytes_340", "pieces_480", "pieces_440")


@dataclass(frozen=True)
class ModelDraw:
    family: str
    tokenizer: str
    seed: int
    kv_heads: int
    extra_rows: int
    """Rows of the head and the embeddings beyond the tokenizer's size."""
    tied: bool
    soft_cap: float | None
    std: float
    """Standard deviation of all weights."""

    def save(self, folder: Path) -> Path:
        """Return the model's folder, in `folder`; write it unless it exists."""
        path = folder / "_".join(str(value) for value in astuple(self))
        if path.exists():
            return path
        saved_tokenizer = tokenizer(self.tokenizer)
        kind, more = FAMILIES[self.family]
        config = kind(
            **more,
            **({"final_logit_softcapping": self.soft_cap} if self.family in SOFT_CAPPED else {}),
            vocab_size=len(saved_tokenizer) + self.extra_rows,
            hidden_size=HIDDEN,
            intermediate_size=INTERMEDIATE,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=HEADS if self.family == "phi" else self.kv_heads,
            max_position_embeddings=128,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=saved_tokenizer.eos_token_id,
            tie_word_embeddings=self.tied,
        )
        model = AutoModelForCausalLM.from_config(deepcopy(config))
        generator = torch.Generator().manual_seed(self.seed)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=self.std, generator=generator)
        model.save_pretrained(path)
        return path


def save_tokenizer(name: str, folder: Path) -> Path:
    """Return the tokenizer's folder. It is not the model's, or transformers would derive its class from the model."""
    path = folder / name
    if not path.exists():
        tokenizer(name).save_pretrained(path)
    return path
