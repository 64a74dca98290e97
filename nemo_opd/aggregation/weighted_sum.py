"""Σ weight_i · KD_i over teachers."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nemo_opd.config.aggregation import WeightedSum
from nemo_opd.types import Batch


def teacher_weights(settings: WeightedSum, weights: Sequence[float], vocab_sizes: Sequence[int]) -> list[float]:
    """Return the factor of each teacher's loss, whatever the sequence (methods.md §6.1).

    The weight, unless weights differ from sequence to sequence and have it in them. With vocabulary scaling
    log W_i / log min_j W_j as well: a divergence over more tokens counts for more.
    """
    own = list(weights) if settings.score is None else [1.0] * len(weights)
    if not settings.vocabulary_scaling:
        return own
    smallest = math.log(min(vocab_sizes))
    return [weight * math.log(size) / smallest for weight, size in zip(own, vocab_sizes, strict=True)]


def weighted(batch: Batch, weights_IB: Tensor) -> Batch:
    """Add the weight of each sequence for each teacher, [teachers, B], to the batch."""
    pairs = zip(batch.teachers, weights_IB, strict=True)
    return replace(batch, teachers=tuple(replace(teacher, weights=weights) for teacher, weights in pairs))
