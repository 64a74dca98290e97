"""Readings of rows of logits that are taken while losses are computed, and train nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.blockwise import compute_dtype
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.read_ahead import ReadAhead
from nemo_opd.logits.rows import LogitRows, TrainableRows
from nemo_opd.logits.term import Term
from nemo_opd.types import Metric

_Read = Callable[[Tensor, slice], Tensor]
"""(logits [u, X] in the compute dtype, which units they are) → what is read off each, [u, k]."""


@dataclass(frozen=True, slots=True)
class Readings:
    """A place for what is read off each unit, so that nothing depends on how units are cut or in which order."""

    source: LogitRows
    places: Tensor
    """[U, k]: of the units that this process computes; 0 elsewhere."""

    @staticmethod
    def of(source: LogitRows, num_units: int, num_values: int) -> Readings:
        return Readings(source, torch.zeros(num_units, num_values, dtype=compute_dtype(source), device=source.device))

    def put(self, part: slice, values: Tensor) -> None:
        """Store the readings [u, k] of a slice of units."""
        self.places[part] = values.detach()

    def found(self) -> Tensor:
        """Gather the readings of all processes of a share, float64 [k, U]. Collective; call when all units are done."""
        return self.source.reduce(self.places.to(torch.float64, copy=True)).t()


def plan_readings(
    source: TrainableRows,
    rows: Tensor,
    read: _Read,
    metrics_of: Callable[[Tensor], dict[str, Metric]],
    *,
    num_values: int,
    cells: Sequence[int],
    width: int,
    chunk_size: int | None = None,
    ahead: ReadAhead | None = None,
) -> PlannedLoss:
    """Plan metrics of what is read off rows [U] of the student's [B·S, V], with a loss and gradient of 0.

    metrics_of: from float64 [k, U]. cells, width, chunk_size, ahead: as of a `Term`.
    """
    readings = Readings.of(source, len(rows), num_values)

    def nothing_of(logits: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            readings.put(part, read(logits, part))
        return _Nothing.apply(logits)

    def found(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        return metrics_of(readings.found())

    term = Term(rows, nothing_of, cells, width, chunk_size=chunk_size, ahead=ahead)
    return PlannedLoss(source, [term], 0.0, found)


class _Nothing(torch.autograd.Function):
    """0 of each row [R, X] → [R], with a gradient of 0, which takes no memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.new_zeros(len(logits))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output.new_zeros(1).expand(ctx.shape)
