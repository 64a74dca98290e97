"""Running a model on whole sequences, however its positions are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.parallelism import Parallelism
from nemo_opd.distributed.mesh import context_axis
from nemo_opd.models.context_parallel import RingAttention


class Sequences:
    """Pads ids to what the layout needs, runs the model on this rank's positions, and gives all of them back."""

    def __init__(self, model: PreTrainedModel, mesh: DeviceMesh | None, parallelism: Parallelism | None) -> None:
        self._model: Any = model
        axis = None if mesh is None else context_axis(mesh)
        self._ring = None if axis is None else RingAttention(axis)
        shared = parallelism is not None and parallelism.sequence_parallel
        self._multiple = (parallelism.tp if parallelism is not None and shared else 1) * (
            1 if self._ring is None else self._ring.multiple
        )

    def run(self, ids: Tensor, result: Callable[[Tensor], Tensor]) -> Tensor:
        """Ids [B, S] → what `result` makes of the model's logits [B, own positions, ·], at all positions: [B, S, ·]."""
        length = ids.shape[1]
        padded = self._padded(length)
        # What is behind a position has no effect on it, so any id will do.
        ids = F.pad(ids, (0, padded - length))
        if self._ring is None:
            made = result(self._model(input_ids=ids, use_cache=False).logits)
        else:
            with self._ring.positions(padded, ids.device) as own:
                positions = own.unsqueeze(0).expand(len(ids), -1)
                output = self._model(input_ids=ids[:, own], position_ids=positions, use_cache=False)
                made = self._ring.whole(result(output.logits), own)
        return made if padded == length else made[:, :length]

    def backward(self, made: Tensor, gradient: Tensor) -> None:
        """From the gradient with respect to what `run` has made [B, S, ·] to that of the model's parameters."""
        if self._ring is None:
            made.backward(gradient)
            return
        with self._ring.positions(self._padded(made.shape[1]), made.device):
            made.backward(gradient)

    def _padded(self, length: int) -> int:
        return -(-length // self._multiple) * self._multiple
