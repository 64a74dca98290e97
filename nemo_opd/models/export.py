"""Whole weights, and Hugging Face folders, from sharded models."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from nemo_opd.distributed.finite import NotFinite, find_not_finite, find_not_finite_here
from nemo_opd.errors import NotFiniteError
from nemo_opd.models.load import load_model
from nemo_opd.models.lora import Adapters


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` loads them.

    Communicates an all-gather of the parameters to rank 0, which alone writes; returns on all ranks when it is done.
    """
    state = gathered(model, dtype)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        # It has written the dtype that the model is trained in.
        config = deepcopy(model.config)
        config.dtype = dtype
        config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    dist.barrier()


def save_adapted(
    model: PreTrainedModel,
    adapters: Adapters,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    dtype: torch.dtype,
    form: Literal["merged", "adapter"],
) -> None:
    """Write what has been learned beside frozen weights, in one of the forms of `student.lora.export`.

    merged: a whole model in `dtype`, of the weights as the base model's files have them and not as they are rounded to
    compute with. adapter: a folder that `peft` loads onto the base model, in fp32. With either goes the tokenizer.

    Communicates an all-gather of the adapters to rank 0, which alone reads and writes; returns on all ranks when it is
    done. Raises ModelError where the base model cannot be read any more.
    """
    state = gathered(model, torch.float32)
    if dist.get_rank() == 0:
        if form == "adapter":
            adapters.save(state, model, folder)
        else:
            merged(adapters, state, dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    dist.barrier()


def whole_state(model: PreTrainedModel, adapters: Adapters | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """On rank 0's host the tensors that a folder of the whole model has, adapters merged; nothing on other ranks.

    Communicates an all-gather of what is trained to rank 0. Raises ModelError as `save_adapted` does.
    """
    state = gathered(model, dtype if adapters is None else torch.float32)
    if dist.get_rank() != 0:
        return {}
    if adapters is not None:
        model = merged(adapters, state, dtype)
        state = untied(model, model.state_dict())
    converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return converted


def merged(adapters: Adapters, state: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """The base model in `dtype` with these adapters in its weights. Raises NotFiniteError where a sum overflows,
    on this rank alone.
    """
    whole = load_model(adapters.base, dtype, key="student.model")
    adapters.merge(state, whole)
    if (found := find_not_finite_here(dict(whole.named_parameters()))) is not None:
        raise not_exported(found, dtype)
    return whole


def gathered(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """The model's whole state in `dtype` on rank 0's host, tied weights once, and nothing on other ranks.

    Raises NotFiniteError on all ranks, before anything is sent, where a value in `dtype` is NaN or infinite.
    """
    state = untied(model, get_model_state_dict(model))
    if (found := find_not_finite(state, device=next(iter(state.values())).device, dtype=dtype)) is not None:
        raise not_exported(found, dtype)
    whole = {}
    for name, value in state.items():
        # Before they are sent, which then is the less.
        value = stored(value, dtype)
        if isinstance(value, DTensor):
            value = value.full_tensor()
        if dist.get_rank() == 0:
            whole[name] = value.cpu()
    return whole


def not_exported(found: NotFinite, dtype: torch.dtype) -> NotFiniteError:
    name = str(dtype).removeprefix("torch.")
    rounded = "; float16 overflows at 65,504, so give a model in bfloat16 as student.model"
    return NotFiniteError(
        f"the student's weights are not finite in {name}, so they are not exported: {found}; lower "
        f"student.optimizer.lr, or set train.gradient_clip{rounded if dtype == torch.float16 else ''}"
    )


def untied(model: PreTrainedModel, state: dict[str, Any]) -> dict[str, Tensor]:
    """Without the second names of weights, and what is no tensor."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and name not in model.all_tied_weights_keys
    }


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
