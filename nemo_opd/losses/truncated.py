"""Comparison with a truncated teacher, whose top tokens only are stored (methods.md §9.1)."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.sparse import SparseLogits
from nemo_opd.losses.softmax import log_sum_exp


def require_whole(teacher: LogitRows, setting: str, why: str) -> None:
    """Raise ConfigError, naming a setting, if the teacher is truncated."""
    if teacher.is_truncated:
        raise ConfigError(
            f"{setting}: {why}, but this teacher gives its likeliest tokens only; change the setting, or build a "
            "cache with --hidden-states or with all tokens (--top-k of the vocabulary's size)"
        )


def require_temperature_1(teacher: LogitRows, temperature: float) -> None:
    """Raise ConfigError for a truncated teacher at a temperature other than 1, since its rest is then unknown."""
    if temperature != 1:
        require_whole(teacher, f"temperature={temperature:g}", "the mass of all tokens changes with it")


def split(teacher: Tensor) -> tuple[Tensor, Tensor]:
    """Split a truncated teacher's columns [U, W + 1] into the vocabulary [U, W] and a rest [U, 1]."""
    return teacher[:, :-1], teacher[:, -1:]


def of_likeliest(teacher: LogitRows, rows: Tensor, log_q: Tensor) -> Tensor:
    """Mask the realised next token if it is not among the k likeliest: log-probabilities [U, W + 1] → [U, W].

    It is stored in any case, but its rank is unknown. All columns that stay finite have known ranks.
    """
    assert isinstance(teacher, SparseLogits)
    return log_q.scatter(1, teacher.next_beyond_likeliest(rows).unsqueeze(1), -torch.inf)[:, :-1]


def joined(*log_masses: Tensor) -> Tensor:
    """Return log Σ exp over all columns of the arguments [U, …], −inf if all are: [U, 1]."""
    return torch.cat(log_masses, 1).logsumexp(1, keepdim=True)


def with_tail_cell(log_t: Tensor, log_s: Tensor, rest_t: Tensor, rest_s: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Merge the cells that no stored teacher token reaches into a rest cell, per unit: [U, X] → [U, X + 1] each.

    log_t, log_s: log-masses of cells, not normalised. log_t is −inf in unreached cells, both are −inf in cells that a
    unit does not have. rest_t, rest_s: log-masses outside the cells [U, 1]; rest_s is None if the student has none.
    Merged cells become −inf on both sides. If the student has no mass in a rest cell, it is dropped, as its
    divergence would be infinite.
    """
    is_unreached = log_t == -torch.inf
    lowest = torch.finfo(log_s.dtype).min
    # Not −inf: if all cells are reached, the gradient of an empty sum would be NaN.
    unreached = log_sum_exp(log_s.masked_fill(~is_unreached, lowest)).unsqueeze(1)
    is_empty = ~(is_unreached & (log_s > -torch.inf)).any(1, keepdim=True)
    if rest_s is not None:
        is_empty = is_empty & (rest_s == -torch.inf)
        unreached = torch.logaddexp(unreached, rest_s.clamp(min=lowest))
    last_t = rest_t.masked_fill(is_empty, -torch.inf)
    last_s = unreached.masked_fill(is_empty, -torch.inf)
    return torch.cat([log_t, last_t], 1), torch.cat([log_s.masked_fill(is_unreached, -torch.inf), last_s], 1)
