"""Values read off rows of logits while losses are computed, without a gradient."""

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
"""(logits [u, X] in the compute dtype, slice of units) → values of each unit, [u, k]."""


@dataclass(frozen=True, slots=True)
class Readings:
    """Values of each unit, stored by unit so that results do not depend on how units are cut or ordered."""

    source: LogitRows
    places: Tensor
    """[U, k]: values of the units that this process computes; 0 for all other units."""

    @staticmethod
    def of(source: LogitRows, num_units: int, num_values: int) -> Readings:
        return Readings(source, torch.zeros(num_units, num_values, dtype=compute_dtype(source), device=source.device))

    def put(self, part: slice, values: Tensor) -> None:
        """Store the values [u, k] of a slice of units."""
        self.places[part] = values.detach()

    def found(self) -> Tensor:
        """Gather the values from all processes of a share, float64 [k, U]. Collective; call when all units are done."""
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
    """Plan metrics of values read off rows [U] of the student's [B·S, V], with a loss and gradient of 0.

    metrics_of: function of the values, float64 [k, U]. cells, width, chunk_size, ahead: as in `Term`.
    """
    readings = Readings.of(source, len(rows), num_values)

    def read_values(logits: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            readings.put(part, read(logits, part))
        return _Zero.apply(logits)

    def metrics_of_sums(weighted: Tensor, unweighted: Tensor) -> dict[str, Metric]:
        return metrics_of(readings.found())

    term = Term(rows, read_values, cells, width, chunk_size=chunk_size, ahead=ahead)
    return PlannedLoss(source, [term], 0.0, metrics_of_sums)


class _Zero(torch.autograd.Function):
    """Zero loss of each row [R, X] → [R], with a zero gradient that takes no memory."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        ctx.shape = logits.shape
        return logits.new_zeros(len(logits))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> Tensor:
        return grad_output.new_zeros(1).expand(ctx.shape)
