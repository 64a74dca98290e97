"""Hugging Face folders from sharded models."""

from copy import deepcopy
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from nemo_opd.models.load import load_model
from nemo_opd.models.lora import Adapters


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` loads them.

    Communicates an all-gather of the parameters to rank 0, which alone writes; returns on all ranks when it is done.
    """
    state = gathered(model)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict={name: stored(value, dtype) for name, value in state.items()})
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
) -> None:
    """Write what has been learned beside frozen weights, in the form that `student.lora.export` names.

    merged: a whole model in `dtype`, of the weights as the base model's files have them and not as they are rounded to
    compute with. adapter: a folder that `peft` loads onto the base model, in fp32. With either goes the tokenizer.

    Communicates an all-gather of the adapters to rank 0, which alone reads and writes; returns on all ranks when it is
    done. Raises ModelError where the base model cannot be read any more.
    """
    state = gathered(model)
    if dist.get_rank() == 0:
        if adapters.settings.export == "adapter":
            adapters.save(state, model, folder)
        else:
            whole = load_model(adapters.base, dtype, key="student.model")
            adapters.merge(state, whole)
            whole.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    dist.barrier()


def gathered(model: PreTrainedModel) -> dict[str, Tensor]:
    """The model's whole state on rank 0's host, and nothing on other ranks."""
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
