"""Comparison with a teacher of whom the likeliest tokens alone are known (methods.md §9.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sparse import SparseLogits
from nemo_opd.losses.softmax import log_sum_exp


def require_whole(teacher: LogitRows, setting: str, why: str) -> None:
    """Raise ConfigError, naming a setting, where the teacher's whole distribution is needed and not known."""
    if teacher.is_truncated:
        raise ConfigError(
            f"{setting}: {why}, and of this teacher the likeliest tokens alone are known; change the setting, or build "
            "a cache with --hidden-states or with all tokens (--top-k of the vocabulary's size)"
        )


def require_temperature_1(teacher: LogitRows, temperature: float) -> None:
    """Raise ConfigError for a temperature at which the mass of the other tokens is not known."""
    if temperature != 1:
        require_whole(teacher, f"temperature={temperature:g}", "the mass of all tokens changes with it")


def split(teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Return the columns of the vocabulary [U, W] and of the rest [U, 1], of a truncated teacher's [U, W + 1]."""
    return teacher[:, :-1], teacher[:, -1:]


def of_likeliest(teacher: LogitRows, rows: Tensor, log_q: Tensor) -> Tensor:
    """Mask the next token if it is not among the k likeliest: log-probabilities [U, W + 1] of rows [U] → [U, W].

    Its rank is not known, since tokens between the k-th and it may be missing. All finite columns have known ranks.
    """
    assert isinstance(teacher, SparseLogits)
    return log_q.scatter(1, teacher.next_beyond_likeliest(rows).unsqueeze(1), -torch.inf)[:, :-1]


def joined(*log_masses: Tensor) -> Tensor:
    """Return log Σ exp of cells [U, 1] each, −inf where all are: [U, 1]."""
    return torch.cat(log_masses, 1).logsumexp(1, keepdim=True)


def reached_and_rest(
    log_t: Tensor, log_s: Tensor, rest_t: Tensor, rest_s: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Join the cells that no stored token reaches, unit by unit, with the rest: [U, X] → [U, X + 1] of either side.

    log_t, log_s: log-masses of the cells, −inf where the teacher's tokens do not reach one, and on both sides where a
    unit does not have the cell; they need not sum to 1.
    rest_t, rest_s: [U, 1], log-masses beyond the cells; None: the student has none. A cell that has joined the rest is
    −inf on both sides. The rest is left out where the student has nothing there, as its divergence would be infinite.
    """
    is_unreached = log_t == -torch.inf
    lowest = torch.finfo(log_s.dtype).min
    # Not −inf: where all cells are reached, the gradient of a sum of none would be NaN.
    unreached = log_sum_exp(log_s.masked_fill(~is_unreached, lowest)).unsqueeze(1)
    is_empty = ~(is_unreached & (log_s > -torch.inf)).any(1, keepdim=True)
    if rest_s is not None:
        is_empty = is_empty & (rest_s == -torch.inf)
        unreached = torch.logaddexp(unreached, rest_s.clamp(min=lowest))
    own_t = rest_t.masked_fill(is_empty, -torch.inf)
    own_s = unreached.masked_fill(is_empty, -torch.inf)
    return torch.cat([log_t, own_t], 1), torch.cat([log_s.masked_fill(is_unreached, -torch.inf), own_s], 1)
