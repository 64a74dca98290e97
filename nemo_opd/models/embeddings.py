"""Input embeddings read from a folder's files, without loading the model."""

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoModelForCausalLM, PretrainedConfig

from nemo_opd.errors import ModelError
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.folder import first_line, safetensors_files
from nemo_opd.models.load import load_config


def input_embeddings(reference: str, *, key: str) -> Tensor:
    """Read the embeddings [vocabulary, hidden width] from a folder's safetensors. Raises ModelError naming `key`."""
    config = load_config(reference, key=key)
    folder = Path(resolve(reference))
    if not folder.is_dir():
        raise ModelError(f"{key}={reference}: there is no such folder; download the model and name its folder")
    files = safetensors_files(folder)
    if not files:
        raise ModelError(f"{key}={reference}: the folder has no safetensors files; save the weights in that format")
    name = _embedding_name(config)
    try:
        file_of = {tensor: file for file in files for tensor in _tensors_like(file, name)}
        stored_name = name if name in file_of else min(file_of, key=len, default=None)
        if stored_name is None:
            raise ModelError(
                f"{key}={reference}: none of {', '.join(file.name for file in files)} holds the input embeddings "
                f"{name} or a tensor whose name ends with {_tail(name)}; name a folder with all weights"
            )
        with safe_open(file_of[stored_name], framework="pt") as weights:
            return weights.get_tensor(stored_name)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{key}={reference}: the weights are damaged ({first_line(error)}); copy them again"
        ) from error


def _embedding_name(config: PretrainedConfig) -> str:
    """Return the input embeddings' name in a model of this architecture, built on meta."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    embeddings = model.get_input_embeddings()
    return next(f"{name}.weight" for name, module in model.named_modules() if module is embeddings)


def _tensors_like(file: Path, name: str) -> list[str]:
    """Return the tensors that share the last two parts of the name: base models' checkpoints have other prefixes."""
    with safe_open(file, framework="pt") as weights:
        return [key for key in weights.keys() if f".{key}".endswith(f".{_tail(name)}")]  # noqa: SIM118


def _tail(name: str) -> str:
    return ".".join(name.split(".")[-2:])
