"""Hugging Face folders from sharded models."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerFast


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` loads them.

    Communicates an all-gather of the parameters to rank 0, which alone writes; returns on all ranks when it is done.
    """
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        weights = {name: stored(value, dtype) for name, value in state.items() if isinstance(value, Tensor)}
        model.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)
    dist.barrier()


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    return value.to(dtype) if value.is_floating_point() else value
