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
    """Raise ModelError where a head, or its input, is kept in fp32 by a model that computes in a lower `dtype`.

    Parameters are gathered and hidden states handed over in that dtype: a head in fp32 would be rounded silently, or
    fail at its first product. key: `student` or `teachers.i`. reference: of the model, for the message.
    """
    if dtype == torch.float32:
        return
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(deepcopy(config), dtype=dtype)  # it writes the dtype there
    head = model.get_output_embeddings()
    if type(head) is not nn.Linear:
        return
    if _is_kept_in_fp32(model, head, dtype):
        what = "its head is kept in float32"
    elif (of_hidden := dtype_before(model, head)) not in (None, dtype):
        what = f"its head reads hidden states in {_name(of_hidden)}"
    else:
        return
    raise ModelError(
        f"{key}.model={reference}: {what} while {key}.dtype computes in {_name(dtype)}, to which the head would be "
        f"rounded; write {key}.dtype=float32"
    )


def _is_kept_in_fp32(model: Any, head: nn.Module, dtype: torch.dtype) -> bool:
    kept = kept_in_fp32(model, dtype)
    return any(kept(f"{name}.weight") for name, module in model.named_modules() if module is head)


def dtype_before(model: Any, head: nn.Linear) -> torch.dtype | None:
    """Return the dtype of the head's input, given the layers' output; None where it cannot be determined."""
    found: list[torch.dtype] = []

    def forward(hidden: Tensor) -> Tensor:
        found.append(hidden.dtype)
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
    except Exception:  # whatever a model's code raises on meta
        return None
    return found[0] if len(found) == 1 else None


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")
