"""Models of the tables and examples of docs/scaling.md."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_opd.preflight.model_info import ModelSize, model_size

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
from step_models import PRESETS, llama, qwen

CONFIGS = {
    "1B": ("meta-llama/Llama-3.2-1B", PRESETS["llama_1b"]),
    "1.7B": ("Qwen/Qwen3-1.7B", lambda: qwen(2048, 6144, 28, 16, 8, 128, 151_936)),
    "4B": ("Qwen/Qwen3-4B", PRESETS["qwen_4b"]),
    "8B": ("meta-llama/Llama-3.1-8B", lambda: untied(llama(4096, 14336, 32, 32, 8, 128, 128_256))),
    "32B": ("Qwen/Qwen3-32B", lambda: untied(qwen(5120, 25600, 64, 64, 8, 128, 151_936))),
    "70B": ("meta-llama/Llama-3.1-70B", lambda: untied(llama(8192, 28672, 80, 64, 8, 128, 128_256))),
}
VOCABULARIES = {"1B": 128_256, "1.7B": 151_669, "4B": 151_669, "8B": 128_256, "32B": 151_669, "70B": 128_256}
"""Ids in each tokenizer."""


def untied(config: Any) -> Any:
    config.tie_word_embeddings = False
    return config


@dataclass(frozen=True)
class Shape:
    """Size and vocabulary of a model, as planning reads them."""

    size: ModelSize
    vocab_size: int


SHAPES = {name: Shape(model_size(make()), VOCABULARIES[name]) for name, (_, make) in CONFIGS.items()}
BY_MODEL = {model: name for name, (model, _) in CONFIGS.items()}
