"""A causal language model that stops before its head, so that no logits are made (METHODS §9)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from nemo_opd.errors import ModelError
from nemo_opd.losses.logit_rows import Head, HeadLogits, TensorLogits

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Names that configurations have for it."""


class WithHead:
    """Calls a model for its logits."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model: Any = model

    def __call__(self, ids: Tensor) -> TensorLogits:
        """Ids [B, S] → logits [B, S, V]."""
        return TensorLogits(self._model(input_ids=ids, use_cache=False).logits)


class Headless:
    """Calls a model for its final hidden states and the head that would make logits of them.

    The model itself is as it was between calls, and so is what it exports. Under FSDP2 the head's weight is gathered
    with the model's other parameters, and is whole until the next reshard.
    """

    def __init__(self, model: PreTrainedModel, *, key: str) -> None:
        """Raises ModelError, naming `key`, for a head that is not one plain linear layer."""
        head: Any = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelError(
                f"{key}: the head is a {type(head).__name__}, not a plain linear layer, so hidden states cannot stand "
                "for logits; use handoff=logits, or an unquantised model"
            )
        self._model: Any = model
        self._linear: Any = head
        self._key = key
        config = model.config.get_text_config()
        self._scale = float(getattr(config, "logit_scale", None) or 1) / float(
            getattr(config, "logits_scaling", None) or 1
        )
        caps = (getattr(config, name, None) for name in SOFT_CAPS)
        self._soft_cap = next((float(cap) for cap in caps if cap), None)
        self._is_checked = False

    @property
    def hidden_size(self) -> int:
        return int(self._linear.weight.shape[1])

    def __call__(self, ids: Tensor) -> HeadLogits:
        """Ids [B, S] → logits [B, S, V], not made yet.

        Raises ModelError at the first call where the model does something else to logits than `Head` does.
        """
        made: list[HeadLogits] = []

        def capture(hidden: Tensor) -> Tensor:
            made.append(HeadLogits(hidden, Head(self._linear.weight, self._linear.bias, self._scale, self._soft_cap)))
            return hidden

        self._linear.forward = capture
        try:
            output: Tensor = self._model(input_ids=ids, use_cache=False).logits
        finally:
            del self._linear.forward
        if not self._is_checked:
            self._check(made, output)
        return made[0]

    def _check(self, made: list[HeadLogits], output: Tensor) -> None:
        """In place of logits the model has been given hidden states; what it did to them it does to logits."""
        if len(made) == 1:
            expected = made[0].head.after_linear(made[0].hidden.detach())
            if output.shape == expected.shape and torch.allclose(
                output.detach().to(expected.dtype), expected, 1e-2, 1e-2
            ):
                self._is_checked = True
                return
        raise ModelError(
            f"{self._key}: {type(self._model).__name__} does more between its head and its logits than a scale and a "
            "soft-cap, so hidden states cannot stand for logits; use handoff=logits"
        )
