"""The tokens that teacher and student find likeliest, taken alternately (methods.md §10.2)."""

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.losses.support import Columns, largest

_SUPPORTS = ("interleaved", "union")


def check_support(support: str, support_size: int) -> None:
    """Raise ConfigError for an unknown support or a size below 1."""
    if support not in _SUPPORTS:
        raise ConfigError(f"support={support!r}: tcad has no such support; choose from {', '.join(_SUPPORTS)}")
    if support_size < 1:
        raise ConfigError(f"support_size={support_size}: a support has at least 1 token; give a larger number")


def interleaved(teacher_logits: Tensor, student_logits: Tensor, size: int) -> Columns:
    """Choose the first `size` distinct columns of teacher's 1st, student's 1st, teacher's 2nd, …, from logits [U, V].

    A constant; size ≤ V.
    """
    ranked = [_ranked(side, size) for side in (teacher_logits, student_logits)]
    by_turns = torch.stack(ranked, -1).flatten(1)
    repeated = _repeats(by_turns)
    place = (~repeated).cumsum(1) - 1
    # Repeats and what is beyond go to one more place, after the others.
    target = place.masked_fill(repeated | (place >= size), size)
    chosen = by_turns.new_empty(len(by_turns), size + 1).scatter_(1, target, by_turns)
    return Columns(chosen[:, :size])


def _ranked(logits: Tensor, size: int) -> Tensor:
    """Return the `size` largest columns of each row, the largest first: [U, V] → int64 [U, size]."""
    found = largest(logits, size)
    return found.gather(1, logits.detach().gather(1, found).argsort(stable=True, dim=1, descending=True))


def _repeats(columns: Tensor) -> Tensor:
    """Mark columns that stand earlier in the row: int64 [U, X] → bool [U, X]."""
    values, order = columns.sort(stable=True, dim=1)
    again = torch.zeros_like(columns, dtype=torch.bool)
    again[:, 1:] = values[:, 1:] == values[:, :-1]
    return torch.zeros_like(again).scatter_(1, order, again)
