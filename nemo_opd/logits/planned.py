"""Losses that are planned first and computed together, so that they share the student's logits.

From the hidden states of a microbatch to gradients, in seven steps:

1. `StudentWorker._accumulate` runs the model without its head.
2. `Parts.plan` asks the loss of each teacher for a plan.
3. `TermLoss.plan` selects that loss's inputs from the batch.
4. The loss returns a `PlannedLoss`: terms, each with its rows and their formula.
5. `compute_together` joins the plans, so that each row of logits is computed once; `blocks` cuts the rows.
6. `blockwise_sum` computes a block's logits, sums each term, and accumulates the gradients of hidden states and head.
7. The model's backward pass runs once, from the finished gradient.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import update_wrapper
from typing import Generic, ParamSpec, Required, get_args, get_origin, get_type_hints

from torch import Tensor

from nemo_opd.logits.blockwise import blockwise_sum
from nemo_opd.logits.rows import TrainableRows
from nemo_opd.logits.term import Term
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

        normalizer: number of units in the global batch, by default `num_units`; with 0 units the loss is 0.
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
