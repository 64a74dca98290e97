"""Checked rows from a server's answer about a prompt (methods.md §13.3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.logits.sparse import SparseLayout, SparseRows
from nemo_opd.rollout.server.completion import ROUNDING
from nemo_opd.rollout.server.http import UnusableError
from nemo_opd.served.programs import PromptLogprobs
from nemo_opd.users_code import shown

_LEAST = -9999.0
"""Log-probability that servers write for −inf, which JSON lacks."""
_NOISE = 2.0**-20
"""Rounding error of a sum of 32-bit probabilities. A smaller remainder cannot be computed from the sum."""
_EXCESS = 0.01
"""Largest excess of a probability sum over 1 that counts as rounding."""
_UNANSWERED = 0.01
"""Largest share of unanswered positions that is accepted without a retry; one position is always accepted."""
_Floats = NDArray[np.float64]


def encoded_rows(answer: PromptLogprobs, ids: NDArray[np.integer[Any]], layout: SparseLayout) -> NDArray[np.uint8]:
    """Encode a server's answer about ids [N]: uint8 [N, row_bytes].

    Head rows without a token (padding) count as remaining mass. The entropy is unknown and therefore NaN. A position
    with a missing or NaN log-probability, or with too few likeliest tokens, is unanswered: the log-probability of its
    next token is NaN. Raises UnusableError for too many unanswered positions, for invalid log-probabilities, and for
    ids outside the vocabulary if all tokens are requested.
    """
    realised, log_p = _checked(answer.realised), _checked(answer.log_p)
    if len(realised) != len(ids) - 1:
        raise UnusableError(f"it has log-probabilities of {len(realised)} of {len(ids) - 1} tokens")
    counts = np.asarray(answer.counts, np.int64)
    if len(counts) != len(ids):
        raise UnusableError(f"it has likeliest tokens of {len(counts)} positions, and {len(ids)} were sent")
    positions = np.repeat(np.arange(len(ids)), counts)
    log_p_next = np.append(realised, 0.0)
    is_answered = (counts >= layout.top_k) & ~np.isnan(log_p_next)
    is_answered[positions[np.isnan(log_p)]] = False
    _require_answers(is_answered, counts, layout.top_k)
    is_used = is_answered[positions]
    top_ids, top = _likeliest(positions[is_used], _ids(answer.ids)[is_used], log_p[is_used], layout.top_k)
    next_ids = np.append(np.asarray(ids[1:], np.int64), -1)[is_answered]
    is_apart = (next_ids >= 0) & ~(top_ids == next_ids[:, None]).any(1)
    is_token = top_ids < layout.vocab_size
    if layout.top_k == layout.vocab_size and not is_token.all():
        raise UnusableError(
            f"id {top_ids[~is_token][0]} is not in the vocabulary, but is one of the {layout.top_k} likeliest ids, "
            "which should be all tokens"
        )
    num_remaining = layout.vocab_size - is_token.sum(1) - is_apart
    apart = np.where(is_apart, log_p_next[is_answered], -np.inf)
    log_rest = _log_rest(top, is_token, apart, num_remaining, np.flatnonzero(is_answered))
    # Tokens before other ids, in their order.
    order = np.argsort(~is_token, axis=1, kind="stable")
    no_token = 256**layout.id_bytes - 1
    rows = SparseRows(
        torch.full((len(ids), layout.top_k), no_token),
        torch.full((len(ids), layout.top_k), -torch.inf),
        torch.from_numpy(np.where(is_answered, log_p_next, np.nan)).float(),
        torch.zeros(len(ids)),
        torch.full((len(ids),), torch.nan),
    )
    mask = torch.from_numpy(is_answered)
    rows.ids[mask] = torch.from_numpy(np.take_along_axis(np.where(is_token, top_ids, no_token), order, 1))
    rows.log_p[mask] = torch.from_numpy(np.take_along_axis(np.where(is_token, top, -np.inf), order, 1)).float()
    rows.log_rest[mask] = torch.from_numpy(log_rest).float()
    return layout.pack(rows).numpy()


def _require_answers(is_answered: NDArray[np.bool_], counts: NDArray[np.int64], top_k: int) -> None:
    """Raise UnusableError if too many positions are unanswered, or all positions with a next token."""
    unanswered = np.flatnonzero(~is_answered)
    is_enough = len(unanswered) <= max(1, _UNANSWERED * len(is_answered)) and is_answered[:-1].any()
    if is_enough or not len(unanswered):
        return
    first = unanswered[0]
    if counts[first] < top_k:
        raise UnusableError(f"it has {counts[first]} likeliest tokens of position {first}, and {top_k} were requested")
    raise UnusableError(
        f"the log-probability is missing or NaN at {len(unanswered)} of {len(is_answered)} positions, first at "
        f"position {first}"
    )


def _likeliest(
    positions: NDArray[np.int64], ids: NDArray[np.int64], log_p: _Floats, top_k: int
) -> tuple[NDArray[np.int64], _Floats]:
    """Return the k likeliest ids of each position and their log-probabilities, [N, k], likeliest first.

    positions: position of each id, ascending. Each of the N positions has at least k ids.
    """
    order = np.lexsort((ids, -log_p, positions))
    # Some programs also list the observed token, so that a position may have k + 1 ids.
    begins = np.searchsorted(positions, positions)
    top_indices = order[np.arange(len(positions)) - begins < top_k]
    top_ids, top = ids[top_indices].reshape(-1, top_k), log_p[top_indices].reshape(-1, top_k)
    if top_k > 1 and (np.diff(np.sort(top_ids, 1), axis=1) == 0).any():
        raise UnusableError("it lists a token twice at one position")
    return top_ids, top


def _log_rest(
    top: _Floats,
    is_token: NDArray[np.bool_],
    apart: _Floats,
    num_remaining: NDArray[np.int64],
    positions: NDArray[np.int64],
) -> _Floats:
    """Return the log of the mass ρ outside the likeliest tokens and the observed token (methods.md (13.3)).

    top, is_token: [N, k]. apart: [N], log-probability of an observed token that is not among the likeliest, else −inf.
    num_remaining: [N], number of remaining tokens in the vocabulary. positions: [N], for messages.
    """
    p = np.exp(top)
    mass = (p * is_token).sum(1) + np.exp(apart)
    if mass.max() > 1 + _EXCESS:
        raise UnusableError(
            f"its probabilities at position {positions[mass.argmax()]} sum to {mass.max():.3f}, which is above 1"
        )
    bound = num_remaining * p[:, -1] + (p * ~is_token).sum(1)
    with np.errstate(divide="ignore"):
        return np.log(np.minimum(np.maximum(1 - mass, _NOISE), bound))


def _checked(log_p: Sequence[Any]) -> _Floats:
    """Return log-probabilities as an array, NaN for None. Raises UnusableError if one is neither."""
    try:
        numbers = np.asarray(log_p, np.float64).reshape(len(log_p))
    except (TypeError, ValueError, OverflowError) as error:
        wrong = next((value for value in log_p if not isinstance(value, int | float | None)), log_p[0])
        raise UnusableError(f"{shown(wrong)} is not a log-probability") from error
    if len(too_large := numbers[numbers > ROUNDING]):
        raise UnusableError(f"{shown(float(too_large[0]))} is not a log-probability")
    return np.where(numbers <= _LEAST, -np.inf, np.minimum(numbers, 0.0))


def _ids(ids: Sequence[Any]) -> NDArray[np.int64]:
    try:
        array = np.asarray(ids, np.int64).reshape(len(ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise UnusableError("its token ids are not integers") from error
    if len(array) and array.min() < 0:
        raise UnusableError(f"{array.min()} is not a token id")
    return array
