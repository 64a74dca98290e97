"""Models and tokenizers from a folder, the hub, or the demo."""

from pathlib import Path

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from nemo_opd.demo import DEMO_PREFIX, is_demo, model_path
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


def load_config(reference: str, *, key: str) -> PretrainedConfig:
    """The model's configuration, once its folder is seen to hold weights. Raises ModelError naming `key`."""
    check_folder(reference, key=key)
    try:
        return AutoConfig.from_pretrained(resolve(reference))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"{key}={reference}: no model configuration could be read ({first_line(error)}); give a folder in Hugging "
            "Face form, or a hub name that this machine can reach"
        ) from error


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


def load_model(reference: str, dtype: torch.dtype, *, key: str) -> PreTrainedModel:
    """A causal language model on the CPU in `dtype`. Raises ModelError naming `key` where weights are unreadable."""
    try:
        model = AutoModelForCausalLM.from_pretrained(resolve(reference), dtype=dtype)
    except Exception as error:  # safetensors, pickle and transformers each raise their own
        raise ModelError(f"{key}={reference}: the weights could not be loaded ({first_line(error)})") from error
    assert isinstance(model, PreTrainedModel)
    return model


def first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
