"""A causal language model that stops before its head, so that no logits are made (METHODS §9)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.mesh import context_axis, tensor_axis
from nemo_opd.distributed.shards import local
from nemo_opd.errors import ModelError
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.parallel import ContextParallelLogits, VocabParallelLogits
from nemo_opd.logits.rows import TensorLogits
from nemo_opd.models.sequences import Sequences
from nemo_opd.models.tensor_styles import own_part

SOFT_CAPS = ("final_logit_softcapping", "logits_soft_cap")
"""Names that configurations have for it."""


OwnLogits = TensorLogits | HeadLogits
"""Of this rank's columns."""
Source = TensorLogits | HeadLogits | VocabParallelLogits | ContextParallelLogits


class LogitSource(ABC):
    """Calls a model for its logits, or for what they are made of.

    However the model is cut, each rank of its context- and tensor-parallel groups gets all positions of its texts, and
    of the vocabulary its own `columns`.

    To train: read losses from `whole` of what a call gave, `cut_off`; go backward from their sum, and then call
    `backward` once with the gradient that the new leaf has got.
    """

    columns: range
    """Of the vocabulary."""

    def __init__(
        self, model: PreTrainedModel, width: int, *, mesh: DeviceMesh | None, parallelism: Parallelism | None
    ) -> None:
        """width: columns of the whole head. mesh, parallelism: those that the model was cut with."""
        self._model, self._mesh = model, mesh
        self._sequences = Sequences(model, mesh, parallelism)
        tensor = None if mesh is None else tensor_axis(mesh)
        self.columns = range(width) if tensor is None else range(*own_part(width, tensor))

    @abstractmethod
    def __call__(self, ids: Tensor) -> OwnLogits:
        """Ids [B, S] → logits [B, S, own columns]. Collective over all of the model's ranks."""

    def whole(self, made: OwnLogits) -> Source:
        """What losses and scores read, to be computed together by all ranks that have these texts.

        Collective over the tensor-parallel group. The gradient it leaves on hidden states is the same on every rank of
        that group, and each has its own on its columns. Over a context-parallel group both are each rank's share.
        """
        tensor, context = (None, None) if self._mesh is None else (tensor_axis(self._mesh), context_axis(self._mesh))
        source = made if tensor is None else VocabParallelLogits(made, tensor.get_group())
        return source if context is None else ContextParallelLogits(source, context.get_group())

    def backward(self, made: OwnLogits, gradient: Tensor) -> None:
        """From the gradient with respect to the first leaf of `made` to that of all parameters.

        Over a context-parallel group gradients are summed: each rank gives that of its share of the loss. Collective
        over all of the model's ranks.
        """
        self._sequences.backward(made.leaves[0], gradient)


class WithHead(LogitSource):
    """Calls a model for its logits."""

    def __init__(
        self, model: PreTrainedModel, *, mesh: DeviceMesh | None = None, parallelism: Parallelism | None = None
    ) -> None:
        super().__init__(model, model.config.get_text_config().vocab_size, mesh=mesh, parallelism=parallelism)

    def __call__(self, ids: Tensor) -> TensorLogits:
        return TensorLogits(self._sequences.run(ids, lambda logits: logits))


class Headless(LogitSource):
    """Calls a model for its final hidden states and the head that would make logits of them.

    The model itself is as it was between calls, and so is what it exports. Hidden states are the same on every rank of
    a tensor-parallel group; of the head each has its `columns`.

    Under FSDP2 the head is gathered with the model's other outer parameters, and stays so until `backward` or the next
    reshard; what is made of it must be read before. Losses leave gradients on the head, which FSDP2 reduces in
    `backward` together with what a tied embedding gets.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        key: str,
        mesh: DeviceMesh | None = None,
        parallelism: Parallelism | None = None,
    ) -> None:
        """mesh, parallelism: those that the model was cut with.

        Raises ModelError, naming `key`, for a head that is not one plain linear layer.
        """
        head: Any = model.get_output_embeddings()
        if type(head) is not nn.Linear:
            raise ModelError(
                f"{key}: the head is a {type(head).__name__}, not a plain linear layer, so hidden states cannot stand "
                "for logits; use handoff=logits, or an unquantised model"
            )
        super().__init__(model, head.weight.shape[0], mesh=mesh, parallelism=parallelism)
        self._linear, self._key = head, key
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
        """Logits that are not made yet.

        Raises ModelError at the first call where the model does something else to logits than `Head` does.
        """
        captured: list[Tensor] = []
        heads: list[Head] = []

        def capture(hidden: Tensor) -> Tensor:
            captured.append(hidden)
            bias = None if self._linear.bias is None else local(self._linear.bias)
            heads.append(Head(local(self._linear.weight), bias, self._scale, self._soft_cap))
            return hidden

        def hidden_states(output: Tensor) -> Tensor:
            if not self._is_checked:
                self._check(captured, heads, output)
            return captured[0]

        with replaced_forward(self._linear, capture):
            hidden = self._sequences.run(ids, hidden_states)
        return HeadLogits(hidden, heads[0])

    def _check(self, captured: list[Tensor], heads: list[Head], output: Tensor) -> None:
        """In place of logits the model has been given hidden states; what it did to them it does to logits."""
        if len(captured) == 1:
            expected = heads[0].after_linear(captured[0].detach())
            if expected.isnan().any():
                return  # NaN says nothing about the model; the next text will.
            if output.shape == expected.shape and torch.allclose(
                output.detach().to(expected.dtype), expected, 1e-2, 1e-2
            ):
                self._is_checked = True
                return
        raise ModelError(
            f"{self._key}: {type(self._model).__name__} does more between its head and its logits than a scale and a "
            "soft-cap, so hidden states cannot stand for logits; use handoff=logits"
        )


@contextmanager
def replaced_forward(module: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Inside, calling the module calls `forward`; what its own call was, another replacement included, comes back."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        del module.forward
        if before is not None:
            module.forward = before
