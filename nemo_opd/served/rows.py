"""Rows of a server's answers about a prompt, checked (methods.md §13.3)."""

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
"""Error of a sum of probabilities that were computed in 32 bits: a rest below it is not known from the sum."""
_EXCESS = 0.01
"""Largest excess of a sum of probabilities over 1 that is taken for rounding."""
_UNANSWERED = 0.01
"""Largest share of positions without an answer, one position at least, for which the request is not repeated."""
_Floats = NDArray[np.float64]


def encoded_rows(answer: PromptLogprobs, ids: NDArray[np.integer[Any]], layout: SparseLayout) -> NDArray[np.uint8]:
    """Encode a server's answer about ids [N]: uint8 [N, row_bytes].

    Tokens that the tokenizer does not have, rows of the head that pad it, count as the rest. The entropy is not known:
    NaN. A position with a missing or NaN log-probability, or with too few likeliest tokens, is unanswered: the
    log-probability of its next token is NaN. Raises UnusableError if more positions are unanswered than a fault of
    single tokens explains, for other numbers that are no log-probabilities, and for ids that are no tokens where all
    tokens are to be known.
    """
    realised, log_p = _checked(answer.realised), _checked(answer.log_p)
    if len(realised) != len(ids) - 1:
        raise UnusableError(f"it has log-probabilities of {len(realised)} of {len(ids) - 1} tokens")
    counts = np.asarray(answer.counts, np.int64)
    if len(counts) != len(ids):
        raise UnusableError(f"it has likeliest tokens of {len(counts)} positions, and {len(ids)} were sent")
    position = np.repeat(np.arange(len(ids)), counts)
    log_p_next = np.append(realised, 0.0)
    is_answered = (counts >= layout.top_k) & ~np.isnan(log_p_next)
    is_answered[position[np.isnan(log_p)]] = False
    _require_most(is_answered, counts, layout.top_k)
    is_named = is_answered[position]
    top_ids, top = _likeliest(position[is_named], _ids(answer.ids)[is_named], log_p[is_named], layout.top_k)
    following = np.append(np.asarray(ids[1:], np.int64), -1)[is_answered]
    is_apart = (following >= 0) & ~(top_ids == following[:, None]).any(1)
    is_token = top_ids < layout.vocab_size
    if layout.top_k == layout.vocab_size and not is_token.all():
        raise UnusableError(
            f"id {top_ids[~is_token][0]} is no token of the vocabulary, and takes a place among the {layout.top_k} "
            "likeliest ids, which were to be all tokens"
        )
    num_others = layout.vocab_size - is_token.sum(1) - is_apart
    apart = np.where(is_apart, log_p_next[is_answered], -np.inf)
    log_rest = _log_rest(top, is_token, apart, num_others, np.flatnonzero(is_answered))
    # Tokens first, which stay in their order.
    order = np.argsort(~is_token, axis=1, kind="stable")
    none = 256**layout.id_bytes - 1
    rows = SparseRows(
        torch.full((len(ids), layout.top_k), none),
        torch.full((len(ids), layout.top_k), -torch.inf),
        torch.from_numpy(np.where(is_answered, log_p_next, np.nan)).float(),
        torch.zeros(len(ids)),
        torch.full((len(ids),), torch.nan),
    )
    where = torch.from_numpy(is_answered)
    rows.ids[where] = torch.from_numpy(np.take_along_axis(np.where(is_token, top_ids, none), order, 1))
    rows.log_p[where] = torch.from_numpy(np.take_along_axis(np.where(is_token, top, -np.inf), order, 1)).float()
    rows.log_rest[where] = torch.from_numpy(log_rest).float()
    return layout.pack(rows).numpy()


def _require_most(is_answered: NDArray[np.bool_], counts: NDArray[np.int64], top_k: int) -> None:
    """Raise UnusableError if no position that has a next token, or too few of all, are answered."""
    unanswered = np.flatnonzero(~is_answered)
    is_enough = len(unanswered) <= max(1, _UNANSWERED * len(is_answered)) and is_answered[:-1].any()
    if is_enough or not len(unanswered):
        return
    first = unanswered[0]
    if counts[first] < top_k:
        raise UnusableError(f"it has {counts[first]} likeliest tokens of position {first}, and {top_k} were asked for")
    raise UnusableError(
        f"it has no log-probability, or NaN, at {len(unanswered)} of {len(is_answered)} positions, the first of which "
        f"is {first}"
    )


def _likeliest(
    position: NDArray[np.int64], ids: NDArray[np.int64], log_p: _Floats, top_k: int
) -> tuple[NDArray[np.int64], _Floats]:
    """Return the k likeliest ids of each position and their log-probabilities, [N, k], likeliest first.

    position: of each named id, ascending; each of the N positions has at least k ids.
    """
    order = np.lexsort((ids, -log_p, position))
    # Some programs name the observed token as well, so that a position may have k + 1.
    begins = np.searchsorted(position, position)
    kept = order[np.arange(len(position)) - begins < top_k]
    top_ids, top = ids[kept].reshape(-1, top_k), log_p[kept].reshape(-1, top_k)
    if top_k > 1 and (np.diff(np.sort(top_ids, 1), axis=1) == 0).any():
        raise UnusableError("it names a token twice at one position")
    return top_ids, top


def _log_rest(
    top: _Floats,
    is_token: NDArray[np.bool_],
    apart: _Floats,
    num_others: NDArray[np.int64],
    position: NDArray[np.int64],
) -> _Floats:
    """Return log of the mass beyond the likeliest tokens and, where it is not one of them, the observed one.

    top, is_token: [N, k]. apart: [N], log-probability of that observed token; −inf where it is one of the likeliest.
    num_others: [N], tokens of the vocabulary beyond all these. position: [N], for messages. The mass is ρ of
    methods.md (13.3).
    """
    p = np.exp(top)
    mass = (p * is_token).sum(1) + np.exp(apart)
    if mass.max() > 1 + _EXCESS:
        raise UnusableError(
            f"its probabilities at position {position[mass.argmax()]} sum to {mass.max():.3f}, which is above 1"
        )
    bound = num_others * p[:, -1] + (p * ~is_token).sum(1)
    with np.errstate(divide="ignore"):
        return np.log(np.minimum(np.maximum(1 - mass, _NOISE), bound))


def _checked(log_p: Sequence[Any]) -> _Floats:
    """Return log-probabilities as an array, NaN for None. Raises UnusableError if one is neither."""
    try:
        numbers = np.asarray(log_p, np.float64).reshape(len(log_p))
    except (TypeError, ValueError, OverflowError) as error:
        wrong = next((value for value in log_p if not isinstance(value, int | float | None)), log_p[0])
        raise UnusableError(f"{shown(wrong)} is no log-probability") from error
    if len(too_large := numbers[numbers > ROUNDING]):
        raise UnusableError(f"{shown(float(too_large[0]))} is no log-probability")
    return np.where(numbers <= _LEAST, -np.inf, np.minimum(numbers, 0.0))


def _ids(ids: Sequence[Any]) -> NDArray[np.int64]:
    try:
        found = np.asarray(ids, np.int64).reshape(len(ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise UnusableError("it names tokens by what are no ids") from error
    if len(found) and found.min() < 0:
        raise UnusableError(f"{found.min()} is no token id")
    return found
