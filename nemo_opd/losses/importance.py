"""Importance weights and clipped ratios of units sampled by another policy (methods.md §10.4, §11)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.errors import ConfigError, check_choice
from nemo_opd.logits.planned import Readings, plan_readings
from nemo_opd.logits.rows import TrainableRows
from nemo_opd.logits.term import unit_cells
from nemo_opd.losses.arguments import label_rows, next_tokens
from nemo_opd.losses.cross_entropy import LIVE_COPIES
from nemo_opd.types import EffectiveShare, Max, Mean, Metric

LARGEST_LOG_RATIO = 20.0
"""Log-ratios beyond ±20 (a factor of 5e8) are clamped and get no gradient; such losses would be meaningless."""
NUM_READINGS = 3
"""Readings per unit: weight π_train / π_behaviour, the weight after cap and veto, and whether the cap applies."""


@dataclass(frozen=True, slots=True)
class Importance:
    """Cap of the weights π_train / π_behaviour, and condition for dropping sequences."""

    level: str = "token"
    """token: each unit's weight; sequence: the product over all sampled tokens of its sequence."""
    cap: float | None = None
    """Upper bound of a weight, or None for no bound."""
    veto: float | None = None
    """Drop sequences that contain a token with a smaller weight. None drops no sequence."""

    def __post_init__(self) -> None:
        """Raise ConfigError for an unknown level or bounds out of range."""
        check_choice("importance_level", self.level, ("token", "sequence"))
        if self.cap is not None and not self.cap > 0:
            raise ConfigError(
                f"importance_cap={self.cap} cannot bound positive weights; give a number above 0, or None"
            )
        if self.veto is not None and not 0 < self.veto < 1:
            raise ConfigError(
                f"importance_veto={self.veto} cannot bound token weights from below; give a number between 0 and 1, "
                "or None"
            )

    def of_sequences(
        self, student: TrainableRows, *, ids: Tensor, mask: Tensor, behaviour: Tensor | None, vocab_size: int
    ) -> SequenceImportance | None:
        """Compute weights and vetoes of sequences, or return None if the settings need neither.

        ids, mask [B, S]: token i counts by the logits at i−1; the logits may have more positions. behaviour [B, S]:
        each token's log-probability under the policy that sampled it, or None for this model. Costs one more forward
        product with the head, without a gradient. Communicates as losses of the same rows do.
        """
        if behaviour is None or (self.level == "token" and self.veto is None):
            return None
        rows = label_rows(mask)
        targets = next_tokens(ids, rows).long()
        width, num_sequences = mask.shape[1], len(ids)

        def find_sequences(rows: Tensor) -> list[Tensor]:
            sequences = rows // width
            return [sequences, torch.bincount(sequences, minlength=num_sequences) > 0]

        sequences, is_sampled = compute_on_host(find_sequences, rows)
        student_rows = sequences * student.shape[1] + rows % width
        log_p = _log_likelihoods(student, student_rows, targets, vocab_size)
        log_weights = log_p - next_tokens(behaviour, rows)
        smallest = log_weights.new_full((num_sequences,), math.inf).scatter_reduce(0, sequences, log_weights, "amin")
        is_vetoed = smallest < (-math.inf if self.veto is None else math.log(self.veto))
        return SequenceImportance(
            log_weights.new_zeros(num_sequences).index_add(0, sequences, log_weights),
            is_vetoed,
            is_sampled,
        )

    def applied(
        self, current: Tensor, proximal: Tensor, behaviour: Tensor, sequences: SequenceImportance | None, units: Tensor
    ) -> Weighted:
        """Compute the weights of units from their log-probabilities [u], without a gradient.

        current: under the current model; proximal: under the reference model of the clipped ratio; behaviour: under the
        sampling policy. units: int64 [u], each unit's sequence. The returned factor multiplies r = exp(current −
        proximal) or its clipped form.
        """
        is_per_sequence = self.level == "sequence" and sequences is not None
        log_weight = current - behaviour
        if is_per_sequence:
            assert sequences is not None
            log_weight = sequences.log_weight.index_select(0, units).to(current.dtype)
        limit = math.inf if self.cap is None else math.log(self.cap)
        log_used = _bounded(log_weight.clamp(max=limit))
        if is_per_sequence:
            log_factor = log_used - (current - proximal)
        else:
            # `current` cancels, so this is exactly 0 if sampling was not warped and the cap does not apply.
            log_factor = proximal - behaviour
            if self.cap is not None:
                log_factor = log_factor - (log_weight - limit).clamp(min=0)
        factor = _bounded(log_factor).exp()
        used = log_used.exp()
        if sequences is not None:
            is_accepted = ~sequences.is_vetoed.index_select(0, units)
            factor, used = factor * is_accepted, used * is_accepted
        unit_weight = _bounded(current - behaviour).exp()
        return Weighted(factor, unit_weight, _bounded(log_weight).exp(), used, log_weight > limit)

    def metrics(self, readings: Tensor, sequences: SequenceImportance | None) -> dict[str, Metric]:
        """Compute metrics of all units from their readings, float64 [NUM_READINGS, U]."""
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
            vetoed = Mean(0.0, 0)
            if sequences is not None:
                vetoed = Mean((sequences.is_vetoed & sequences.is_sampled).sum(), sequences.is_sampled.sum())
            metrics["policy/vetoed_fraction"] = vetoed
        return metrics


@dataclass(frozen=True, slots=True)
class SequenceImportance:
    """Importance weights of sequences over all their sampled tokens."""

    log_weight: Tensor
    """[B]: log of the product of the tokens' weights."""
    is_vetoed: Tensor
    """bool [B]: the sequence is dropped."""
    is_sampled: Tensor
    """bool [B]: the sequence has tokens that count."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """Weights of units, all [u]."""

    factor: Tensor
    """Factor of the clipped ratio; that ratio already contains π_train / π_old."""
    unit_weight: Tensor
    """π_train / π_behaviour of the unit itself, before cap and veto."""
    weight: Tensor
    """π_train / π_behaviour of the unit or of its sequence, as `level` says."""
    used: Tensor
    """The weight after cap and veto, 0 for dropped sequences. Factor of a loss without a ratio."""
    is_truncated: Tensor
    """bool: the cap applies."""

    def readings(self) -> Tensor:
        """Stack the readings [u, NUM_READINGS]."""
        return torch.stack([self.weight, self.used, self.is_truncated.to(self.weight.dtype)], 1)


def _bounded(log_weight: Tensor) -> Tensor:
    """Clamp to ±`LARGEST_LOG_RATIO`, so that the exponential stays usable in a loss."""
    return log_weight.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)


def _log_likelihoods(student: TrainableRows, rows: Tensor, targets: Tensor, vocab_size: int) -> Tensor:
    """Compute log p of targets [U] from logit rows [U] of [B·S, V], immediately and without a gradient: float64 [U]."""
    result: list[Tensor] = []

    def read(logits: Tensor, part: slice) -> Tensor:
        log_p = logits.log_softmax(-1)
        return log_p.gather(1, targets[part].unsqueeze(1))

    def metrics_of(values: Tensor) -> dict[str, Metric]:
        result.append(values[0])
        return {}

    cells = unit_cells(len(rows), LIVE_COPIES * vocab_size)
    with torch.no_grad():
        readings = Readings.of(student, len(rows), 1)
        plan_readings(student, rows, read, metrics_of, readings=readings, cells=cells, width=vocab_size).compute()
    return result[0]


@dataclass(frozen=True, slots=True)
class Clip:
    """Bounds of the importance ratio."""

    low: float
    """The ratio is clipped below at 1 − low."""
    high: float
    """The ratio is clipped above at 1 + high."""
    dual: float | None = None
    """Upper bound of the factor of a negative advantage, or None for no bound."""

    def __post_init__(self) -> None:
        """Raise ConfigError for bounds out of range."""
        if not 0 <= self.low < 1:
            raise ConfigError(
                f"clip_low={self.low}: ratios are clipped at 1 − clip_low; give a number from 0 to below 1"
            )
        if not self.high >= 0:
            raise ConfigError(f"clip_high={self.high}: ratios are clipped at 1 + clip_high; give 0 or more")
        if self.dual is not None and not self.dual > 1:
            raise ConfigError(
                f"dual_clip={self.dual}: it bounds ratios of tokens with a negative advantage; give a number above 1, "
                "or None"
            )

    def __call__(self, log_ratio: Tensor, advantage: Tensor) -> _Surrogate:
        """Compute −min(r A, clip(r) A) for r = exp(log_ratio), and −max(that minimum, dual · A) for A < 0: [u] and [u].

        The advantage gets no gradient.
        """
        ratio = log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO).exp()
        advantage = advantage.detach()
        unclipped = ratio * advantage
        clipped = ratio.clamp(1 - self.low, 1 + self.high) * advantage
        gain = torch.minimum(unclipped, clipped)
        if self.dual is not None:
            gain = torch.where(advantage < 0, torch.maximum(gain, self.dual * advantage), gain)
        return _Surrogate(-gain, ratio.detach(), (gain != unclipped).detach())


@dataclass(frozen=True, slots=True)
class _Surrogate:
    """Policy-gradient loss of units."""

    loss: Tensor
    """[u]"""
    ratio: Tensor
    """[u], detached."""
    is_clipped: Tensor
    """bool [u]: clipping changed the loss, so that the unit has no gradient."""


def clip_metrics(ratio: Tensor, is_clipped: Tensor) -> dict[str, Metric]:
    """Return the clipped fraction and the mean ratio of units, from [U] and [U]."""
    return {
        "policy/clip_fraction": Mean(is_clipped.sum(), len(is_clipped)),
        "policy/ratio": Mean(ratio.sum(), len(ratio)),
    }
