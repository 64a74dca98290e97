"""Importance weights: how much units count that another policy sampled (methods.md §11)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import planned
from nemo_opd.errors import ConfigError
from nemo_opd.logits.readings import plan_readings
from nemo_opd.logits.rows import TrainableRows
from nemo_opd.logits.term import unit_cells
from nemo_opd.losses.clipped_ratio import LARGEST_LOG_RATIO
from nemo_opd.losses.reduction import label_rows, next_tokens
from nemo_opd.losses.surprise import LIVE_COPIES
from nemo_opd.types import EffectiveShare, Max, Mean, Metric

_LEVELS = ("token", "sequence")
NUM_READINGS = 3
"""Readings of each unit: its weight π_train / π_behaviour, the weight that counts, and whether that one is smaller."""


@dataclass(frozen=True, slots=True)
class Importance:
    """Bounds of the weights π_train / π_behaviour, and the condition for dropping a sequence."""

    level: str = "token"
    """One of _LEVELS: the weight of each unit, or the product over all sampled tokens of its sequence."""
    cap: float | None = None
    """Upper bound of a weight; None: no bound."""
    veto: float | None = None
    """A sequence with a token of a smaller weight counts for nothing; None: none is dropped."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown level or bounds out of range."""
        if self.level not in _LEVELS:
            raise ConfigError(f"importance_level={self.level!r}: there is no such level; choose from token, sequence")
        if self.cap is not None and not self.cap > 0:
            raise ConfigError(f"importance_cap={self.cap}: weights are cut at it; give a number above 0, or none")
        if self.veto is not None and not 0 < self.veto < 1:
            raise ConfigError(
                f"importance_veto={self.veto}: it is the smallest weight of a token that is believed; give a number "
                "between 0 and 1, or none"
            )

    def of_sequences(
        self, student: TrainableRows, *, ids: Tensor, mask: Tensor, behaviour: Tensor | None, vocab_size: int
    ) -> SequenceImportance | None:
        """Compute weights and vetoes of whole sequences; None if the settings need neither.

        ids, mask [B, S]: token i counts, by the logits at i−1, of which there may be further positions; behaviour
        [B, S]: its log-probability by the policy that sampled it; None: by this model. One forward product with the
        head more, without a gradient. Communicates as losses of the same rows do.
        """
        if behaviour is None or (self.level == "token" and self.veto is None):
            return None
        rows = label_rows(mask)
        targets = next_tokens(ids, rows).long()
        width, num_sequences = mask.shape[1], len(ids)

        def of_rows(rows: Tensor) -> list[Tensor]:
            sequences = rows // width
            return [sequences, torch.bincount(sequences, minlength=num_sequences) > 0]

        sequences, is_sampled = planned(of_rows, rows)
        student_rows = sequences * student.shape[1] + rows % width
        own = _log_likelihoods(student, student_rows, targets, vocab_size)
        weights = own - next_tokens(behaviour, rows)
        smallest = weights.new_full((num_sequences,), math.inf).scatter_reduce(0, sequences, weights, "amin")
        is_vetoed = smallest < (-math.inf if self.veto is None else math.log(self.veto))
        return SequenceImportance(
            weights.new_zeros(num_sequences).index_add(0, sequences, weights),
            is_vetoed,
            is_sampled,
        )

    def applied(
        self, own: Tensor, proximal: Tensor, behaviour: Tensor, sequences: SequenceImportance | None, units: Tensor
    ) -> Weighted:
        """Return the weights of units from their log-probabilities [u], without a gradient.

        own: by the model as it is; proximal: by the one that the clipped ratio refers to; behaviour: by the policy that
        sampled. units: int64 [u], the sequence of each. The factor goes before r = exp(own − proximal) or its clipped
        form.
        """
        is_whole = self.level == "sequence" and sequences is not None
        log_weight = own - behaviour
        if is_whole:
            assert sequences is not None
            log_weight = sequences.log_weight.index_select(0, units).to(own.dtype)
        limit = math.inf if self.cap is None else math.log(self.cap)
        log_used = _bounded(log_weight.clamp(max=limit))
        if is_whole:
            log_factor = log_used - (own - proximal)
        else:
            # Exactly 0 where nothing is warped and nothing cut: own cancels out of a token's own weight.
            log_factor = proximal - behaviour
            if self.cap is not None:
                log_factor = log_factor - (log_weight - limit).clamp(min=0)
        factor = _bounded(log_factor).exp()
        used = log_used.exp()
        if sequences is not None:
            is_kept = ~sequences.is_vetoed.index_select(0, units)
            factor, used = factor * is_kept, used * is_kept
        of_unit = _bounded(own - behaviour).exp()
        return Weighted(factor, of_unit, _bounded(log_weight).exp(), used, log_weight > limit)

    def metrics(self, readings: Tensor, sequences: SequenceImportance | None) -> dict[str, Metric]:
        """Return metrics of all units from their readings [NUM_READINGS, U] in float64."""
        weight, used, is_truncated = readings
        count = len(weight)
        metrics: dict[str, Metric] = {
            "policy/weight": Mean(weight.sum(), count),
            "policy/weight_max": Max(weight.max() if count else 0.0),
            "policy/effective_share": EffectiveShare(used.sum(), used.square().sum(), count),
        }
        if self.cap is not None:
            metrics["policy/truncated_fraction"] = Mean(is_truncated.sum(), count)
        if self.veto is not None:
            metrics["policy/vetoed_fraction"] = Mean(0.0, 0) if sequences is None else sequences.vetoed_fraction()
        return metrics


@dataclass(frozen=True, slots=True)
class SequenceImportance:
    """The weights of sequences, over all their sampled tokens."""

    log_weight: Tensor
    """[B]: of the product of the tokens' weights."""
    is_vetoed: Tensor
    """bool [B]"""
    is_sampled: Tensor
    """bool [B]: it has tokens that count."""

    def vetoed_fraction(self) -> Mean:
        return Mean((self.is_vetoed & self.is_sampled).sum(), self.is_sampled.sum())


@dataclass(frozen=True, slots=True)
class Weighted:
    """Weights of units; all [u]."""

    factor: Tensor
    """Factor of the clipped ratio, which has π_train / π_old itself."""
    of_unit: Tensor
    """π_train / π_behaviour of each unit, before any cut."""
    weight: Tensor
    """π_train / π_behaviour of the unit or its sequence."""
    used: Tensor
    """The weight that counts: cut, and 0 for a sequence that was dropped. Factor of a loss without a ratio."""
    is_truncated: Tensor
    """bool"""

    def readings(self) -> Tensor:
        """Return the readings [u, NUM_READINGS]."""
        return torch.stack([self.weight, self.used, self.is_truncated.to(self.weight.dtype)], 1)


def _bounded(log_weight: Tensor) -> Tensor:
    """Cut at ±`LARGEST_LOG_RATIO`, so that a loss can be made of its exponential."""
    return log_weight.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _log_likelihoods(student: TrainableRows, rows: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Compute log p of targets [U] by rows [U] of the student's [B·S, V], float64 [U], now and without a gradient."""
    found: list[Tensor] = []

    def read(logits: Tensor, part: slice) -> Tensor:
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, targets[part].unsqueeze(1))

    def metrics_of(values: Tensor) -> dict[str, Metric]:
        found.append(values[0])
        return {}

    cells = unit_cells(len(rows), LIVE_COPIES * vocab_size)
    with torch.no_grad():
        plan_readings(student, rows, read, metrics_of, num_values=1, cells=cells, width=vocab_size).compute()
    return found[0]
