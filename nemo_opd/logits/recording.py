"""Losses of single units of a plan, recorded while the plan is computed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.readings import Readings
from nemo_opd.logits.term import Term


@dataclass(frozen=True, slots=True)
class UnitLossRecorder:
    """Losses of the units of a plan, each placed at the first token that it predicts.

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
        """Return Σ factor · loss of the units at each token, float64 [B, S]. Collective, like `Readings.found`."""
        total = self._token_zeros(torch.float64)
        for term, readings in zip(self.plan.terms, self.readings, strict=True):
            total.index_add_(0, _first_tokens(term), term.factor * readings.found()[0])
        return total.view(self.plan.source.shape[:2])

    def is_unit(self) -> Tensor:
        """Return which tokens have a unit, bool [B, S]."""
        is_unit = self._token_zeros(torch.bool)
        for term in self.plan.terms:
            is_unit.index_fill_(0, _first_tokens(term), True)
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


def _first_tokens(term: Term) -> Tensor:
    """Return the first token that each unit predicts, int64 [U], indices into [B·S]."""
    if term.begins is None:
        return term.rows + 1
    return term.rows[torch.tensor(term.begins[:-1], dtype=torch.int64, device=term.rows.device)] + 1
