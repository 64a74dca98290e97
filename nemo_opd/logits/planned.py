"""Losses that are planned first and computed together, and values that are read off the logits meanwhile."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Any, Generic, ParamSpec, Required, get_args, get_origin, get_type_hints

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nemo_opd.logits.blockwise import blockwise_sum, compute_dtype
from nemo_opd.logits.rows import LogitRows, TrainableRows
from nemo_opd.logits.term import ReadAhead, Term
from nemo_opd.types import LossOutput, Mean, Metric

_Parameters = ParamSpec("_Parameters")
_Metrics = dict[str, Metric]


@dataclass(frozen=True, slots=True)
class PlannedLoss:
    """coefficient · Σ terms over units, with its metrics."""

    source: TrainableRows
    """The student's logits."""
    terms: Sequence[Term]
    coefficient: float
    metrics_of: Callable[[Tensor, Tensor], _Metrics]
    """Function from the sums of the terms, weighted and unweighted, to metrics."""

    @staticmethod
    def of(
        name: str, source: TrainableRows, terms: Sequence[Term], num_units: int, normalizer: float | None
    ) -> PlannedLoss:
        """Plan Σ terms / normalizer, with the unweighted mean over units as the metric `name` (methods.md §7.1).

        normalizer: divisor, counted over the global batch, by default `num_units`; with 0 units the loss is 0.
        """
        divisor = (num_units if normalizer is None else normalizer) or 1
        return PlannedLoss(source, terms, 1 / divisor, lambda weighted, unweighted: {name: Mean(unweighted, num_units)})

    def times(self, factor: float) -> PlannedLoss:
        """Return the loss multiplied by a weight, with the same metrics."""
        return replace(self, coefficient=self.coefficient * factor)

    def compute(self) -> LossOutput:
        return compute_together([self])


def compute_together(losses: Sequence[PlannedLoss]) -> LossOutput:
    """Compute the sum of a student's losses, and the metrics of each.

    Each row is computed once and one gradient is saved for all losses; with hidden states, the products with the head
    run once.
    """
    terms = [term for loss in losses for term in loss.terms]
    coefficients = [loss.coefficient for loss in losses for _ in loss.terms]
    result = blockwise_sum(losses[0].source, terms, coefficients)
    metrics: _Metrics = {}
    for loss, sums in zip(losses, result.of_terms.split([len(loss.terms) for loss in losses]), strict=True):
        metrics |= loss.metrics_of(*sums.sum(0))
    return LossOutput(result.total, metrics)


class Loss(Generic[_Parameters]):
    """Function from tensors to a loss. `plan` takes the same arguments and returns a `PlannedLoss`."""

    def __init__(self, plan: Callable[_Parameters, PlannedLoss]) -> None:
        self.plan = plan
        update_wrapper(self, plan)
        self.__signature__ = _signature(plan)

    def __call__(self, *args: _Parameters.args, **kwargs: _Parameters.kwargs) -> LossOutput:
        return self.plan(*args, **kwargs).compute()

    def __reduce__(self) -> str:
        """Pickle by name, as functions are."""
        return self.plan.__qualname__


def _signature(plan: Callable[..., object]) -> inspect.Signature:
    """Return the signature of the loss, with `**shared: Unpack[…]` expanded into its keywords."""
    parameters = []
    for parameter in inspect.signature(plan).parameters.values():
        if parameter.kind is not parameter.VAR_KEYWORD:
            parameters.append(parameter)
            continue
        annotation = parameter.annotation
        unpacked = eval(annotation, plan.__globals__) if isinstance(annotation, str) else annotation
        (shared,) = get_args(unpacked)
        for name, hint in get_type_hints(shared, include_extras=True).items():
            is_required = get_origin(hint) is Required
            default, kind = (parameter.empty, get_args(hint)[0]) if is_required else (None, hint)
            parameters.append(inspect.Parameter(name, parameter.KEYWORD_ONLY, default=default, annotation=kind))
    return inspect.Signature(parameters, return_annotation=LossOutput)


_Read = Callable[[Tensor, slice], Tensor]
"""(logits [u, X] in the compute dtype, slice of units) → values of each unit, [u, k]."""


def plan_readings(
    source: TrainableRows,
    rows: Tensor,
    read: _Read,
    metrics_of: Callable[[Tensor], _Metrics],
    *,
    readings: Readings,
    cells: Sequence[int],
    width: int,
    chunk_size: int | None = None,
    ahead: ReadAhead | None = None,
) -> PlannedLoss:
    """Plan metrics of values read off rows [U] of the student's [B·S, V], with a loss and gradient of 0.

    metrics_of: function of the values, float64 [k, U]. readings: store of the values. cells, width, chunk_size, ahead:
    as in `Term`.
    """

    def read_values(logits: Tensor, part: slice) -> Tensor:
        with torch.no_grad():
            readings.put(part, read(logits, part))
        return _Zero.apply(logits)

    def metrics_of_sums(weighted: Tensor, unweighted: Tensor) -> _Metrics:
        return metrics_of(readings.gather())

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

    def gather(self) -> Tensor:
        """Gather the values from all processes of a share, float64 [k, U]. Collective; call when all units are done."""
        return self.source.reduce(self.places.to(torch.float64, copy=True)).t()


@dataclass(frozen=True, slots=True)
class UnitLossRecorder:
    """Losses of the units of a plan, each placed at the first token that it predicts or at its term's `recorded_at`.

    For validation only: when a gradient is computed, terms may bypass the function that records.
    """

    plan: PlannedLoss
    """The plan to compute; it records the losses."""
    readings: Sequence[Readings]
    """Losses of units, for each term."""

    @staticmethod
    def of(plan: PlannedLoss) -> UnitLossRecorder:
        readings = [Readings.of(plan.source, term.num_units, 1) for term in plan.terms]
        terms = [_recorded(term, term_readings) for term, term_readings in zip(plan.terms, readings, strict=True)]
        return UnitLossRecorder(replace(plan, terms=terms), readings)

    def losses(self) -> Tensor:
        """Return Σ factor · loss of the units at each token, float64 [B, S]. Collective, like `Readings.gather`."""
        total = self._token_zeros(torch.float64)
        for term, readings in zip(self.plan.terms, self.readings, strict=True):
            total.index_add_(0, _recorded_tokens(term), term.factor * readings.gather()[0])
        return total.view(self.plan.source.shape[:2])

    def is_unit(self) -> Tensor:
        """Return which tokens have a unit, bool [B, S]."""
        is_unit = self._token_zeros(torch.bool)
        for term in self.plan.terms:
            is_unit.index_fill_(0, _recorded_tokens(term), True)
        return is_unit.view(self.plan.source.shape[:2])

    def _token_zeros(self, dtype: torch.dtype) -> Tensor:
        batch, width, _ = self.plan.source.shape
        return torch.zeros(batch * width, dtype=dtype, device=self.plan.source.device)


def _recorded(term: Term, readings: Readings) -> Term:
    def loss_of(logits: Tensor, part: slice) -> Tensor:
        losses = term.loss_of(logits, part)
        readings.put(part, losses.unsqueeze(1))
        return losses

    return replace(term, loss_of=loss_of)


def _recorded_tokens(term: Term) -> Tensor:
    """Return the token that each unit's loss is recorded at, int64 [U], indices into [B·S]."""
    if term.recorded_at is not None:
        return term.recorded_at
    return term.first_of_units(term.rows) + 1
