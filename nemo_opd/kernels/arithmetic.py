"""Functions shared by the kernels."""

from __future__ import annotations

import triton
import triton.language as tl

LOWEST = tl.constexpr(-3.0e38)
"""Finite stand-in for a maximum of −∞, so that subtracting it from −∞ does not give NaN."""


@triton.jit
def add_to_sum(peak, total, x, weight):  # type: ignore[no-untyped-def]
    """Add weight · exp(x) to total · exp(peak) in each lane; return the new peak and total."""
    new = tl.maximum(peak, tl.where(weight > 0, x, -float("inf")))
    return new, total * tl.exp(peak - new) + tl.where(weight > 0, weight * tl.exp(x - new), 0.0)


@triton.jit
def log_of_sum(peak, total):  # type: ignore[no-untyped-def]
    """Sum over lanes; return the peak, and the log of the sum minus the peak."""
    highest = tl.max(peak, 0)
    return highest, tl.log(tl.sum(total * tl.exp(peak - highest), 0))


@triton.jit
def _expm1_of_negative(x):  # type: ignore[no-untyped-def]
    """Compute exp(x) − 1 for x ≤ 0, near 0 by a Taylor polynomial, since the difference would cancel."""
    series = 1 + x / 7 * (1 + x / 8)
    for j in tl.static_range(6, 1, -1):
        series = 1 + x / j * series
    return tl.where(x > -0.5, x * series, tl.exp(x) - 1)


@triton.jit
def _log1p_of_negative(x):  # type: ignore[no-untyped-def]
    """Compute log(1 + x) for −1 ≤ x ≤ 0, near 0 by the series of 2 artanh(x / (2 + x))."""
    y = x / (2 + x)
    q = y * y
    near = 2 * y * (1 + q * (1.0 / 3 + q * (1.0 / 5 + q * (1.0 / 7 + q / 9))))
    return tl.where(x > -0.25, near, tl.log(1 + x))


@triton.jit
def _not_nan(x):  # type: ignore[no-untyped-def]
    """Replace NaN from 0 · ±∞ by 0."""
    return tl.where(x == x, x, 0.0)


@triton.jit
def compare(t, s, log_ratio, KIND: tl.constexpr, weight):  # type: ignore[no-untyped-def]
    """Return the divergence of each cell, and its derivative with respect to log s (methods.md §3.1).

    t, s: the teacher's and the student's probability of the cell. log_ratio: log t − log s. KIND: see `forms`. Both
    results are homogeneous in t and s, so that parts of a cell add up to the cell.
    """
    excess = s - t
    if KIND == 3:
        smaller_weight = tl.where(log_ratio >= 0, 1 - weight, weight)
        mixture = _log1p_of_negative(_expm1_of_negative(-tl.abs(log_ratio)) * smaller_weight)
        # 0 if a side is empty, but NaN if it is NaN: no other part of jsd would show that.
        gradient = tl.where(s == 0, 0.0, (tl.minimum(-log_ratio, 0.0) - mixture) * s) * (1 - weight)
        teacher_part = tl.where(t == 0, 0.0, (tl.minimum(log_ratio, 0.0) - mixture) * t)
        return teacher_part * weight + gradient, gradient
    if KIND == 4:
        sign = tl.where(excess > 0, 0.5, tl.where(excess < 0, -0.5, 0.0))
        return tl.abs(excess) / 2, sign * s
    forward = _not_nan(log_ratio * t)
    reverse = _not_nan(-log_ratio * s)
    if KIND == 0:
        return forward + excess, excess
    if KIND == 1:
        return reverse - excess, reverse
    value = weight * forward + (1 - weight) * reverse + (2 * weight - 1) * excess
    return value, (1 - weight) * reverse + weight * excess
