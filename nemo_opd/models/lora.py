"""Low-rank adapters on a model's linear layers (Hu et al. 2021), with `peft`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nemo_opd.config.model import ALL_LINEAR, Lora
from nemo_opd.errors import ModelError
from nemo_opd.models.adapter_folder import resolve
from nemo_opd.models.causal_model import replaced_forward

NAME = "default"
"""The adapter's name within parameter names."""
PEFT_PREFIX = "base_model.model."
"""Prefix of parameter names in an adapter file."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Low-rank adapters that are trained instead of the weights of `base`."""

    settings: Lora
    base: str
    """Value of `student.model`."""
    seed: int
    """Seed of the initial values."""

    def attach(self, model: PreTrainedModel) -> None:
        """Add fp32 adapters to the target layers of an unsharded model, which may be on meta, and freeze other weights.

        The names of the target layers' weights change to `base_name`. Raises ModelError for a quantised model and for
        targets that the model does not have.
        """
        if getattr(model.config, "quantization_config", None) is not None:
            raise ModelError(
                f"student.lora is set and student.model={self.base} is quantised: adapters need plain weights, "
                "into which they are merged; name the unquantised model"
            )
        # Imported here, since the import takes seconds in every process.
        from peft import LoraConfig, inject_adapter_in_model

        base = resolve(self.base)
        config = LoraConfig(
            r=self.settings.rank,
            lora_alpha=self.settings.alpha,
            lora_dropout=self.settings.dropout,
            target_modules=self._targets(_linear_layers(model)),
            base_model_name_or_path=str(Path(base).absolute()) if Path(base).is_dir() else base,
            task_type="CAUSAL_LM",
        )
        device = next(model.parameters()).device
        # peft's random values are replaced later; drawing them must not advance the run's generators (dropout).
        with device, torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            inject_adapter_in_model(config, model, adapter_name=NAME)
        for _, parameter in adapter_parameters(model):
            parameter.data = parameter.data.float()  # peft takes the precision of weights that are not on meta

    def _targets(self, names: Sequence[str]) -> list[str]:
        """Return suffixes of the layer names, out of `names`, that get an adapter."""
        targets, suffixes = self.settings.target_modules, sorted({name.rpartition(".")[2] for name in names})
        if targets == ALL_LINEAR:
            return suffixes
        for target in targets:
            if not any(f".{name}".endswith(f".{target}") for name in names):
                raise ModelError(
                    f"student.lora.target_modules={list(targets)}: {self.base} has no linear layer {target} that can "
                    f"take an adapter; choose from {', '.join(suffixes)}, or all-linear"
                )
        return list(targets)

    def initial_values(self, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        """Yield name and full initial value, on the CPU, of each adapter parameter: A like a linear layer, B zero.

        The values do not depend on how the model is sharded.
        """
        generator = torch.Generator().manual_seed(self.seed)
        for name, parameter in adapter_parameters(model):
            value = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
            yield name, value

    def save(self, state: Mapping[str, Tensor], model: PreTrainedModel, folder: Path) -> None:
        """Write a folder for `peft`. state: full adapter tensors, keyed by name in `model`, which has them attached."""
        from peft import get_peft_model_state_dict

        tensors = get_peft_model_state_dict(model, dict(state), NAME)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {f"{PEFT_PREFIX}{name}": tensor.contiguous() for name, tensor in tensors.items()},
            folder / "adapter_model.safetensors",
            {"format": "pt"},
        )
        adapted: Any = model
        config = copy(adapted.peft_config[NAME])
        config.inference_mode = True
        config.save_pretrained(str(folder))

    @torch.no_grad()
    def merge(self, state: Mapping[str, Tensor], model: PreTrainedModel) -> None:
        """Merge adapters into the weights of an unsharded `model` without adapters. state: as in `save`."""
        self.attach(model)
        for name, parameter in adapter_parameters(model):
            parameter.copy_(state[name])
        for name, layer in list(lora_layers(model)):
            layer.merge(adapter_names=[NAME])
            model.set_submodule(name, layer.get_base_layer())
        del model.peft_config


def _linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of layers that can take an adapter: not the head, which losses read as a plain matrix."""
    head = model.get_output_embeddings()
    return [
        name for name, module in model.named_modules() if isinstance(module, nn.Linear | Conv1D) and module is not head
    ]


def lora_layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and module of the layers with adapters."""
    return ((name, module) for name, module in model.named_modules() if _has_adapter(module))


def _has_adapter(module: nn.Module) -> bool:
    return isinstance(getattr(module, "lora_A", None), nn.ModuleDict)


def adapter_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of the adapters, in the model's order."""
    for owner, layer in lora_layers(model):
        for name, parameter in layer.named_parameters():
            if name.startswith("lora_"):
                yield f"{owner}.{name}", parameter


@contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Compute with the base model only inside; requires_grad stays unchanged."""
    with ExitStack() as inside:
        for _, layer in lora_layers(model):
            # peft's switch also sets requires_grad, which FSDP2 reads at the first all-gather.
            inside.enter_context(replaced_forward(layer, layer.get_base_layer().forward))
        yield


def base_name(model: nn.Module, name: str) -> str:
    """Return the name, in a model with adapters, of the parameter or buffer that is `name` in the base model."""
    owner, _, attribute = name.rpartition(".")
    return f"{owner}.base_layer.{attribute}" if _has_adapter(model.get_submodule(owner)) else name


def keep_adapters_only(model: nn.Module) -> None:
    """Restrict the model's state dict to its adapters; base weights are loaded with the base model."""
    adapter_names = {name for name, _ in adapter_parameters(model)}

    def drop_base_weights(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name in [name for name in state if name.removeprefix(prefix) not in adapter_names]:
            del state[name]

    def ignore_missing_base_weights(_: nn.Module, incompatible: Any) -> None:
        incompatible.missing_keys[:] = [name for name in incompatible.missing_keys if name in adapter_names]

    model.register_state_dict_post_hook(drop_base_weights)
    model.register_load_state_dict_post_hook(ignore_missing_base_weights)
