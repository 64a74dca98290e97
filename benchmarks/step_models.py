"""The models and texts of `step.py`: random weights of given shapes, and documents that fill a sequence."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from tokenizers import Tokenizer
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PretrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

from nemo_opd.demo.python_sources import arrow_file
from nemo_opd.models.load import load_tokenizer

MARKS = 2
"""Tokens that a run puts around a text: one that begins it and one that ends it."""
STRIDE_CHARS = 997
"""Between the beginnings of two documents in the corpus: prime, so that no two begin alike."""


def llama(*shape: int) -> LlamaConfig:
    own = {"max_position_embeddings": 131_072, "rms_norm_eps": 1e-5}
    return LlamaConfig(**settings(*shape), **own, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0})


def qwen(*shape: int) -> Qwen3Config:
    rope = {"rope_type": "default", "rope_theta": 1_000_000.0}
    return Qwen3Config(**settings(*shape), max_position_embeddings=40_960, rope_parameters=rope)


def settings(width: int, inner: int, layers: int, heads: int, keys: int, head: int, vocab: int = 1) -> dict[str, Any]:
    """Of a decoder of this shape, with a tied head."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": keys,
        "head_dim": head,
        "vocab_size": vocab,
        "bos_token_id": None,
        "eos_token_id": None,
        "tie_word_embeddings": True,
    }


PRESETS = {
    "llama_tiny": lambda: llama(128, 384, 4, 4, 2, 32),
    "qwen_tiny": lambda: qwen(192, 576, 4, 4, 2, 48),
    "llama_mid": lambda: llama(384, 1152, 8, 6, 2, 64),
    "qwen_mid": lambda: qwen(640, 1920, 12, 8, 2, 80),
    "llama_1b": lambda: llama(2048, 8192, 16, 32, 8, 64, 128_256),
    "llama_3b": lambda: llama(3072, 8192, 28, 24, 8, 128, 128_256),
    "qwen_4b": lambda: qwen(2560, 9728, 36, 32, 8, 128, 151_936),
}
"""Shapes: the last three are those of Llama-3.2-1B, Llama-3.2-3B and Qwen3-4B. Without a vocabulary they take the
tokenizer's.
"""
UNUSED_ROWS = 0.1
"""Share of a head's rows that may be no tokens: published models pad theirs by less than a hundredth."""


@dataclass(frozen=True)
class Written:
    """A folder as a run wants it, model and tokenizer."""

    name: str
    """A preset, or the path of a config.json or of its folder."""
    tokenizer: str
    """A folder, or a `demo:` name."""
    folder: Path


def shape_of(name: str) -> PretrainedConfig:
    """A preset, or the path of a config.json or of its folder. Raises SystemExit for neither."""
    if name in PRESETS:
        return PRESETS[name]()
    if not Path(name).exists():
        raise SystemExit(f"{name}: neither a file nor one of {', '.join(PRESETS)}")
    return AutoConfig.from_pretrained(name, trust_remote_code=False)


def check_tokenizer(name: str, num_rows: int, num_ids: int) -> None:
    """Raise SystemExit for a tokenizer with far fewer ids than the model's head has rows.

    Logits have the tokenizer's columns, so that losses would cost next to nothing.
    """
    if num_ids < (1 - UNUSED_ROWS) * num_rows:
        raise SystemExit(
            f"{name}: its head has {num_rows:,} rows and its tokenizer {num_ids:,} ids, to which logits are cut; give "
            "the tokenizers of the models with --tokenizers FOLDER and --pair, or set NEMO_OPD_TOKENIZERS"
        )


def write_apart(models: Sequence[Written], dtype: torch.dtype, device: str) -> None:
    """Write those models that are not there yet, in a process that ends and gives the memory of the device back.

    Raises SystemExit for a shape that is not there, or a tokenizer of another model.
    """
    models = [model for model in models if not model.folder.is_dir()]
    for model in models:
        num_ids = len(load_tokenizer(model.tokenizer, key="--pair"))
        check_tokenizer(model.name, shape_of(model.name).get_text_config().vocab_size, num_ids)
    process = get_context("spawn").Process(target=write_models, args=(models, dtype, device))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit("the models could not be written; the reason is above")


def write_models(models: Sequence[Written], dtype: torch.dtype, device: str) -> None:
    for model in models:
        part = model.folder.with_name(f"{model.folder.name}.part")
        write_model(model.name, load_tokenizer(model.tokenizer, key="--pair"), part, dtype, device)
        part.rename(model.folder)  # whole, or not there


def write_model(name: str, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype, device: str) -> None:
    """Random weights of a shape, and the tokenizer, in Hugging Face form."""
    config = shape_of(name)
    config.vocab_size = max(config.get_text_config().vocab_size, len(tokenizer))
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    torch.manual_seed(0)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def corpus_text(corpus: Path | None) -> str:
    """All records of a JSON lines file, or the demo's training documents."""
    if corpus is None:
        with pa.memory_map(str(arrow_file("train"))) as source:
            return "\n".join(pa.ipc.open_stream(source).read_all().column("text").to_pylist())
    return "\n".join(json.loads(line)["text"] for line in corpus.read_text(encoding="utf-8").splitlines())


def write_texts(
    file: Path, text: str, tokenizers: tuple[PreTrainedTokenizerFast, ...], *, count: int, length: int
) -> Path:
    """JSON lines of documents that fill `length` tokens of the tokenizer that needs most, so that none is cut."""
    backends = [tokenizer.backend_tokenizer for tokenizer in tokenizers]
    with file.open("w", encoding="utf-8") as sink:
        for i in range(count):
            start = i * STRIDE_CHARS % len(text)
            rest = (text[start:] + text)[: 8 * length]
            stop = min(characters(backend, rest, length - MARKS) for backend in backends)
            sink.write(json.dumps({"text": rest[:stop]}, ensure_ascii=False) + "\n")
    return file


def characters(backend: Tokenizer, text: str, tokens: int) -> int:
    """That the first so many tokens of a text stand for."""
    offsets = backend.encode(text, add_special_tokens=False).offsets
    return int(offsets[min(tokens, len(offsets)) - 1][1])
