"""Supports that alternate between the teacher's and the student's likeliest tokens (methods.md §10.2)."""

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.support import Columns, largest

_SUPPORTS = ("interleaved", "union")


def check_support(support: str, support_size: int) -> None:
    """Raise ConfigError for an unknown support or a size below 1."""
    if support not in _SUPPORTS:
        raise ConfigError(f"support={support!r} is unknown; choose from {', '.join(_SUPPORTS)}")
    if support_size < 1:
        raise ConfigError(f"support_size={support_size}: a support has at least 1 token; give a larger number")


def interleaved(teacher_logits: Tensor, student_logits: Tensor, size: int) -> Columns:
    """Choose the first `size` distinct columns of teacher's 1st, student's 1st, teacher's 2nd, …, from logits [U, V].

    size ≤ V. The choice gets no gradient.
    """
    ranked = [_ranked(side, size) for side in (teacher_logits, student_logits)]
    alternating = torch.stack(ranked, -1).flatten(1)
    repeated = _repeats(alternating)
    place = (~repeated).cumsum(1) - 1
    # Repeats and columns beyond `size` go to an extra last place.
    target = place.masked_fill(repeated | (place >= size), size)
    columns = alternating.new_empty(len(alternating), size + 1).scatter_(1, target, alternating)
    return Columns(columns[:, :size])


def _ranked(logits: Tensor, size: int) -> Tensor:
    """Return the `size` largest columns of each row, the largest first: [U, V] → int64 [U, size]."""
    columns = largest(logits, size)
    return columns.gather(1, logits.detach().gather(1, columns).argsort(stable=True, dim=1, descending=True))


def _repeats(columns: Tensor) -> Tensor:
    """Mark columns that occur earlier in their row: int64 [U, X] → bool [U, X]."""
    values, order = columns.sort(stable=True, dim=1)
    is_repeat = torch.zeros_like(columns, dtype=torch.bool)
    is_repeat[:, 1:] = values[:, 1:] == values[:, :-1]
    return torch.zeros_like(is_repeat).scatter_(1, order, is_repeat)
