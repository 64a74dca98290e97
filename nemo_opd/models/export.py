"""Export of sharded models as Hugging Face folders or full state dicts."""

from copy import deepcopy
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from transformers import PreTrainedModel, PreTrainedTokenizerFast
from transformers.core_model_loading import revert_weight_conversion

from nemo_opd.distributed.collectives import NotFinite, find_not_finite, find_not_finite_here, gathered
from nemo_opd.errors import NotFiniteError
from nemo_opd.models.load import load_model
from nemo_opd.models.lora import Adapters


def save_pretrained(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerFast, folder: Path, dtype: torch.dtype
) -> None:
    """Write model and tokenizer so that `from_pretrained(folder)` loads them.

    Communicates an all-gather of the parameters; only rank 0 writes, and all ranks return afterwards.
    """
    state = _gathered(model, dtype)
    if dist.get_rank() == 0:
        model.save_pretrained(folder, state_dict=state)
        # save_pretrained has written the dtype of training.
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
    """Write adapters in one of the forms of `student.lora.export`, and the tokenizer.

    merged: a complete model in `dtype`, from the base model's files, since weights in memory may be rounded to the
    compute dtype. adapter: a folder that `peft` loads onto the base model, in fp32. Communicates an all-gather of the
    adapters; only rank 0 reads and writes, and all ranks return afterwards. Raises ModelError if the base model can no
    longer be read.
    """
    state = _gathered(model, torch.float32)
    if dist.get_rank() == 0:
        if form == "adapter":
            adapters.save(state, model, folder)
        else:
            _merged(adapters, state, dtype).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    dist.barrier()


def whole_state(model: PreTrainedModel, adapters: Adapters | None, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the full state dict as a model folder has it, adapters merged, on rank 0's host; {} on other ranks.

    Communicates an all-gather of the trained parameters. Raises ModelError as `save_adapted` does.
    """
    state = _gathered(model, dtype if adapters is None else torch.float32)
    if dist.get_rank() != 0:
        return {}
    if adapters is not None:
        model = _merged(adapters, state, dtype)
        state = _untied(model, model.state_dict())
    converted: dict[str, Tensor] = revert_weight_conversion(model, state)
    return converted


def _merged(adapters: Adapters, state: dict[str, Tensor], dtype: torch.dtype) -> PreTrainedModel:
    """Load the base model in `dtype` and merge adapters. Raises NotFiniteError on this rank if a sum overflows."""
    model = load_model(adapters.base, dtype, key="student.model")
    adapters.merge(state, model)
    if (not_finite := find_not_finite_here(dict(model.named_parameters()))) is not None:
        raise _not_exported(not_finite, dtype)
    return model


def _gathered(model: PreTrainedModel, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the model's full state in `dtype`, with tied weights once, on rank 0's host; {} on other ranks.

    Raises NotFiniteError on all ranks, before anything is sent, if a value in `dtype` is NaN or infinite.
    """
    sharded = _untied(model, get_model_state_dict(model))
    if (not_finite := find_not_finite(sharded, device=next(iter(sharded.values())).device, dtype=dtype)) is not None:
        raise _not_exported(not_finite, dtype)
    state = {}
    for name, value in sharded.items():
        # Converted first, so that less is sent.
        value = gathered(stored(value, dtype))
        if dist.get_rank() == 0:
            state[name] = value.cpu()
    return state


def _not_exported(not_finite: NotFinite, dtype: torch.dtype) -> NotFiniteError:
    name = str(dtype).removeprefix("torch.")
    fp16_hint = "; float16 overflows at 65,504, so give a model in bfloat16 as student.model"
    return NotFiniteError(
        f"the student's weights are not finite in {name}, so they are not exported: {not_finite}; lower "
        f"student.optimizer.lr, or set train.gradient_clip{fp16_hint if dtype == torch.float16 else ''}"
    )


def _untied(model: PreTrainedModel, state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the tensors of a state, with tied weights once."""
    return {
        name: value
        for name, value in state.items()
        if isinstance(value, Tensor) and name not in model.all_tied_weights_keys
    }


def stored(value: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert floating-point tensors to `dtype`."""
    return value.to(dtype) if value.is_floating_point() else value
