"""Check that a model's head is computed in the precision of the run."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast

from nemo_opd.errors import ModelError
from nemo_opd.models.head import replaced_forward
from nemo_opd.models.stored_weights import kept_in_fp32


def check_head_precision(config: PretrainedConfig, dtype: torch.dtype, *, key: str, reference: str) -> None:
    """Raise ModelError if a model that computes in a lower `dtype` keeps its head, or the head's input, in fp32.

    Parameters are gathered and hidden states handed over in that dtype: an fp32 head would be rounded silently, or fail
    in its first product. key: `student` or `teachers.i`. reference: the model's, for the message.
    """
    if dtype == torch.float32:
        return
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)  # writes the dtype into it
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    if _is_kept_in_fp32(model, head, dtype):
        reason = "its head is kept in float32"
    elif (input_dtype := dtype_before(model, head)) not in (None, dtype):
        reason = f"its head reads hidden states in {_name(input_dtype)}"
    else:
        return
    raise ModelError(
        f"{key}.model={reference}: {reason} while {key}.dtype computes in {_name(dtype)}, which would round the head; "
        f"write {key}.dtype=float32"
    )


def _is_kept_in_fp32(model: Any, head: nn.Module, dtype: torch.dtype) -> bool:
    is_kept = kept_in_fp32(model, dtype)
    return any(is_kept(f"{name}.weight") for name, module in model.named_modules() if module is head)


def dtype_before(model: Any, head: nn.Linear) -> torch.dtype | None:
    """Return the dtype of the head's input for layers that output `head`'s dtype; None if it cannot be determined."""
    dtypes: list[torch.dtype] = []

    def forward(hidden: Tensor) -> Tensor:
        dtypes.append(hidden.dtype)
        return hidden

    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    last = torch.zeros(1, 2, head.in_features, dtype=head.weight.dtype, device="meta")
    try:
        with (
            torch.no_grad(),
            replaced_forward(model.base_model, lambda *_, **__: MoeModelOutputWithPast(last_hidden_state=last)),
            replaced_forward(head, forward),
        ):
            model(input_ids=ids, use_cache=False)
    except Exception:  # each model's code may raise its own errors on meta
        return None
    return dtypes[0] if len(dtypes) == 1 else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
