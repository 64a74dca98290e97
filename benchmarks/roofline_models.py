"""Models and recipes of the roofline: published shapes, from which models without values are made."""

from dataclasses import dataclass, replace
from typing import Any

from transformers import LlamaConfig, Phi3Config, PretrainedConfig, Qwen3Config

_LLAMA = {"vocab_size": 128_256, "rms_norm_eps": 1e-5, "max_position_embeddings": 131_072, "num_key_value_heads": 8}
_QWEN3 = {"vocab_size": 151_936, "head_dim": 128, "num_key_value_heads": 8, "max_position_embeddings": 40_960}
_PHI4 = {"vocab_size": 200_064, "partial_rotary_factor": 0.75, "num_key_value_heads": 8, "pad_token_id": 0}
_TINY = {"vocab_size": 512, "num_key_value_heads": 2}


@dataclass(frozen=True)
class Shape:
    """The numbers of a model's config.json on the Hugging Face hub."""

    kind: type[PretrainedConfig]
    width: int
    inner: int
    layers: int
    heads: int
    is_tied: bool
    more: dict[str, Any]

    def config(self, layers: int | None = None, tp: int = 1) -> PretrainedConfig:
        """Return the configuration, with fewer layers if asked; tp: of what one of so many ranks has of each layer."""
        more = self.more | {"num_key_value_heads": max(1, self.more["num_key_value_heads"] // tp)}
        return self.kind(
            hidden_size=self.width,
            intermediate_size=self.inner // tp,
            num_hidden_layers=layers or self.layers,
            num_attention_heads=self.heads // tp,
            tie_word_embeddings=self.is_tied,
            **({"head_dim": self.width // self.heads} | more),
        )


MODELS = {
    "Llama-3.2-1B": Shape(LlamaConfig, 2048, 8192, 16, 32, True, _LLAMA),
    "Llama-3.2-3B": Shape(LlamaConfig, 3072, 8192, 28, 24, True, _LLAMA),
    "Phi-4-mini": Shape(Phi3Config, 3072, 8192, 32, 24, True, _PHI4),
    "Qwen3-1.7B": Shape(Qwen3Config, 2048, 6144, 28, 16, True, _QWEN3),
    "Qwen3-4B": Shape(Qwen3Config, 2560, 9728, 36, 32, True, _QWEN3),
    "Qwen3-32B": Shape(Qwen3Config, 5120, 25_600, 64, 64, False, _QWEN3),
    "tiny": Shape(LlamaConfig, 64, 128, 3, 4, True, _TINY),
}


@dataclass(frozen=True)
class Recipe:
    """A student and its teachers, as a configuration file has them."""

    name: str
    config: str
    """File in configs/ whose settings count."""
    overrides: tuple[str, ...]
    student: str
    teachers: tuple[str, ...]
    lengths: tuple[int, ...]
    """Tokens of the sequences of a microbatch, on either side."""
    sequences: int
    """Sequences of an optimizer step."""
    is_sampled: bool = False


WEB = (1011, 402, 243, 211, 118, 63)
"""A row of 2,048 tokens of documents as the web has them: a median of a few hundred tokens, and few long ones."""
ROWS = 4
"""Rows of a microbatch off-policy."""

RECIPES = (
    Recipe(
        "off-policy",
        "off_policy_distillation",
        (),
        "Llama-3.2-1B",
        ("Phi-4-mini", "Llama-3.2-3B"),
        ROWS * WEB,
        64 * len(WEB),
    ),
    Recipe(
        "1B from 4B",
        "off_policy_distillation",
        ("teachers=qwen3_4b",),
        "Llama-3.2-1B",
        ("Qwen3-4B",),
        ROWS * WEB,
        64 * len(WEB),
    ),
    Recipe(
        "1B from 3B and 4B",
        "off_policy_distillation",
        (
            "teachers=[{name:llama3b,type:same_tokenizer,model:meta-llama/Llama-3.2-3B},"
            "{name:qwen3_4b,type:cross_tokenizer,model:Qwen/Qwen3-4B}]",
        ),
        "Llama-3.2-1B",
        ("Llama-3.2-3B", "Qwen3-4B"),
        ROWS * (2048,),
        16,
    ),
    Recipe(
        "on-policy",
        "on_policy_distillation",
        (),
        "Qwen3-1.7B",
        ("Qwen3-32B",),
        (2048,) * 6,
        252,
        is_sampled=True,
    ),
)
CUT = replace(RECIPES[-1], name="on-policy, teacher cut by tp: 8", overrides=("teachers.0.parallelism.tp=8",))
"""The same with activations that are summed in place of weights that are gathered."""
TINY = Recipe("tiny", "off_policy_distillation", ("teachers=qwen3_4b",), "tiny", ("tiny",), ROWS * (40, 24), 8)
