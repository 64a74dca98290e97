"""Means over seeds with intervals, and paired differences to a control."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

LEVEL = 0.95
ANGLES = 200_001
"""Points of the numeric integral; it leaves an error below 1e-6 of the quantile."""


@dataclass(frozen=True)
class Interval:
    mean: float
    half_width: float | None
    """Of the 95 % interval; None for a single value."""


@dataclass(frozen=True)
class Comparison:
    """One measure of one setting."""

    by_seed: dict[int, float]
    mean: Interval
    difference: Interval | None
    """To the control, over the seeds that both have; None where there are none."""


def interval(values: Sequence[float]) -> Interval:
    """Mean and half width of its 95 % interval by Student's t, from one value on."""
    mean = statistics.fmean(values)
    if len(values) == 1:
        return Interval(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, student_t(len(values) - 1) * error)


def student_t(degrees: int) -> float:
    """The half width of the central 95 % of Student's t.

    With T = √n · tan θ the density of θ is cos(θ)ⁿ⁻¹, up to a constant, on (−π/2, π/2).
    """
    angles = np.linspace(0, np.pi / 2, ANGLES)
    density = np.cos(angles) ** (degrees - 1)
    below = np.concatenate([[0.0], np.cumsum((density[1:] + density[:-1]) / 2)])
    angle = np.interp(LEVEL, below / below[-1], angles)
    return float(math.sqrt(degrees) * np.tan(angle))


def compare(values: Mapping[int, float], control: Mapping[int, float]) -> Comparison:
    """Values by seed, at least one, against those of the control."""
    common = sorted(values.keys() & control.keys())
    difference = interval([values[seed] - control[seed] for seed in common]) if common else None
    return Comparison(dict(sorted(values.items())), interval(list(values.values())), difference)
