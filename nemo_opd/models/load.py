"""Models and tokenizers from a folder, the hub, or the demo."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
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
from nemo_opd.demo import DEMO_PREFIX, is_demo, model_path
from nemo_opd.distributed.finite import NotFinite
from nemo_opd.errors import ModelError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)


def resolve(reference: str) -> str:
    """A folder or hub name; `demo:NAME` becomes the folder that comes with the package."""
    return str(model_path(reference.removeprefix(DEMO_PREFIX))) if is_demo(reference) else reference


def load_tokenizer(reference: str, *, key: str) -> PreTrainedTokenizerFast:
    """Raises ModelError, naming `key`, where there is no tokenizer or none with a fast backend."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(resolve(reference))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{key}={reference}: no tokenizer could be loaded ({first_line(error)}); give a folder with "
            "tokenizer.json, or a hub name that this machine can reach"
        ) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(
            f"{key}={reference}: {type(tokenizer).__name__} has no fast backend, from which token bytes are read; "
            "convert it to a tokenizer.json"
        )
    return tokenizer


def tokenizer_of(settings: Model, *, key: str) -> PreTrainedTokenizerFast:
    """A model's tokenizer with the chat template that the settings name.

    Raises ModelError naming what is under `key`.
    """
    name, source = settings.tokenizer_source
    tokenizer = load_tokenizer(source, key=f"{key}.{name}")
    if settings.chat_template is not None:
        tokenizer.chat_template = read_template(settings.chat_template, key=f"{key}.chat_template")
    return tokenizer


def read_template(path: str, *, key: str) -> str:
    """Raises ModelError, naming `key`, for a file that cannot be read."""
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"{key}={path}: {error}; name a file with a Jinja chat template") from error


def load_config(reference: str, *, key: str) -> PretrainedConfig:
    """The configuration of a causal language model whose folder, where it is one, holds whole weights.

    Raises ModelError naming `key`.
    """
    check_folder(reference, key=key)
    try:
        config = AutoConfig.from_pretrained(resolve(reference))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{key}={reference}: no model configuration could be read ({first_line(error)}); give a folder in Hugging "
            "Face form, or a hub name that this machine can reach"
        ) from error
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"{key}={reference}: {config.model_type} is no causal language model; name a model that continues text"
        )
    return config


def check_folder(reference: str, *, key: str) -> None:
    folder = Path(resolve(reference))
    if not folder.is_dir():
        if folder.is_absolute() or reference.startswith("."):
            raise ModelError(f"{key}={reference}: there is no such folder; check the path")
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"{key}={reference}: the folder has no config.json; give a folder in Hugging Face form")
    if not any((folder / name).is_file() for name in WEIGHT_FILES):
        raise ModelError(
            f"{key}={reference}: the folder has no weights (none of {', '.join(WEIGHT_FILES)}); copy them there or "
            "name another folder"
        )
    try:
        files = safetensors_files(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{key}={reference}: {WEIGHT_FILES[1]} is damaged ({first_line(error)}); copy it there again"
        ) from error
    for file in files:
        try:
            with safe_open(file, framework="numpy"):  # reads the header, and compares the file's length with it
                pass
        except (OSError, SafetensorError) as error:
            raise ModelError(
                f"{key}={reference}: {file.name} is missing or damaged ({first_line(error)}); copy it there again"
            ) from error


def safetensors_files(folder: Path) -> list[Path]:
    """The files that the weights are read from; none where they are in another format."""
    if (folder / WEIGHT_FILES[0]).is_file():
        return [folder / WEIGHT_FILES[0]]
    index = folder / WEIGHT_FILES[1]
    if not index.is_file():
        return []
    shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
    return [folder / shard for shard in sorted(set(shards))]


def load_model(reference: str, dtype: torch.dtype, *, key: str) -> PreTrainedModel:
    """A causal language model, whole, on the CPU in `dtype`.

    Raises ModelError naming `key` where weights are unreadable or, which transformers would draw at random, missing.
    """
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(resolve(reference), dtype=dtype, output_loading_info=True)
    except Exception as error:  # safetensors, pickle and transformers each raise their own
        raise unreadable(reference, error, key=key) from error
    model: PreTrainedModel = loaded[0]
    check_nothing_missing(reference, sorted(loaded[1]["missing_keys"]), key=key)
    return model


def unreadable(reference: str, error: BaseException, *, key: str) -> ModelError:
    return ModelError(
        f"{key}={reference}: the weights could not be loaded ({first_line(error)}); copy them there again, or name "
        "another model"
    )


def check_nothing_missing(reference: str, missing: list[str], *, key: str) -> None:
    """Raises ModelError, naming `key`, where there are names of weights that the model has and its folder has not."""
    if missing:
        raise ModelError(
            f"{key}={reference}: {len(missing)} weights are missing ({', '.join(missing[:3])}); name a folder with all "
            "weights of its config.json"
        )


def not_finite(reference: str, found: NotFinite, dtype: torch.dtype, *, key: str) -> ModelError:
    name = str(dtype).removeprefix("torch.")
    rounded = f"; {name} overflows at 65,504, so try {key.removesuffix('.model')}.dtype=bfloat16"
    return ModelError(
        f"{key}={reference}: {found} in {name}, and a model computes nothing with them; copy the weights there again, "
        f"or name another model{rounded if dtype == torch.float16 else ''}"
    )


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
