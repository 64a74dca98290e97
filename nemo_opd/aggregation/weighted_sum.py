"""Σ weight_i · KD_i over teachers."""

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor

from nemo_opd.config.aggregation import WeightedSum
from nemo_opd.types import Batch


def teacher_weights(settings: WeightedSum, weights: Sequence[float], vocab_sizes: Sequence[int]) -> list[float]:
    """Return the sequence-independent factor of each teacher's loss (methods.md §6.1).

    It is the teacher's weight, or 1 with weights per sequence, which already include it. Vocabulary scaling multiplies
    it by log W_i / log min_j W_j, so that a divergence over more tokens counts for more.
    """
    factors = list(weights) if settings.score is None else [1.0] * len(weights)
    if not settings.vocabulary_scaling:
        return factors
    smallest = math.log(min(vocab_sizes))
    return [factor * math.log(size) / smallest for factor, size in zip(factors, vocab_sizes, strict=True)]


def weighted(batch: Batch, weights_IB: Tensor) -> Batch:
    """Set each teacher's sequence weights, [teachers, B], in the batch."""
    pairs = zip(batch.teachers, weights_IB, strict=True)
    return replace(batch, teachers=tuple(replace(teacher, weights=weights) for teacher, weights in pairs))
