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
_Floats = NDArray[np.float64]


def encoded_rows(answer: PromptLogprobs, ids: NDArray[np.integer[Any]], layout: SparseLayout) -> NDArray[np.uint8]:
    """Encode a server's answer about ids [N]: uint8 [N, row_bytes].

    Tokens that the tokenizer does not have, rows of the head that pad it, count as the rest. The entropy is not known:
    NaN. Raises UnusableError for too few log-probabilities, for numbers that are none, and for such rows where all
    tokens are to be known.
    """
    top_ids, top = _likeliest(answer, len(ids), layout.top_k)
    realised = _checked(answer.realised)
    if len(realised) != len(ids) - 1:
        raise UnusableError(f"it has log-probabilities of {len(realised)} of {len(ids) - 1} tokens")
    following = np.append(np.asarray(ids[1:], np.int64), -1)
    log_p_next = np.append(realised, 0.0)
    is_apart = (following >= 0) & ~(top_ids == following[:, None]).any(1)
    is_token = top_ids < layout.vocab_size
    if layout.top_k == layout.vocab_size and not is_token.all():
        raise UnusableError(
            f"id {top_ids[~is_token][0]} is no token of the vocabulary, and takes a place among the {layout.top_k} "
            "likeliest ids, which were to be all tokens"
        )
    num_others = layout.vocab_size - is_token.sum(1) - is_apart
    log_rest = _log_rest(top, is_token, np.where(is_apart, log_p_next, -np.inf), num_others)
    # Tokens first, which stay in their order.
    order = np.argsort(~is_token, axis=1, kind="stable")
    none = 256**layout.id_bytes - 1
    top_ids = np.take_along_axis(np.where(is_token, top_ids, none), order, 1)
    top = np.take_along_axis(np.where(is_token, top, -np.inf), order, 1)
    numbers = (log_p_next, log_rest, np.full(len(ids), np.nan))
    rows = SparseRows(torch.from_numpy(top_ids), _tensor(top), *map(_tensor, numbers))
    return layout.pack(rows).numpy()


def _tensor(values: _Floats) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32))


def _likeliest(answer: PromptLogprobs, length: int, top_k: int) -> tuple[NDArray[np.int64], _Floats]:
    """Return the k likeliest ids of each position and their log-probabilities, [N, k], likeliest first."""
    counts = np.asarray(answer.counts, np.int64)
    if len(counts) != length:
        raise UnusableError(f"it has likeliest tokens of {len(counts)} positions, and {length} were sent")
    if counts.min() < top_k:
        raise UnusableError(
            f"it has {counts.min()} likeliest tokens of position {counts.argmin()}, and {top_k} were asked for"
        )
    ids, log_p = _ids(answer.ids), _checked(answer.log_p)
    row = np.repeat(np.arange(length), counts)
    order = np.lexsort((ids, -log_p, row))
    # Some programs name the observed token as well, so that a position may have k + 1.
    is_kept = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts) < top_k
    kept = order[is_kept]
    top_ids, top = ids[kept].reshape(length, top_k), log_p[kept].reshape(length, top_k)
    if top_k > 1 and (np.diff(np.sort(top_ids, 1), axis=1) == 0).any():
        raise UnusableError("it names a token twice at one position")
    return top_ids, top


def _log_rest(top: _Floats, is_token: NDArray[np.bool_], apart: _Floats, num_others: NDArray[np.int64]) -> _Floats:
    """Return log of the mass beyond the likeliest tokens and, where it is not one of them, the observed one.

    top, is_token: [N, k]. apart: [N], log-probability of that observed token; −inf where it is one of the likeliest.
    num_others: [N], tokens of the vocabulary beyond all these. The mass is ρ of methods.md (13.3).
    """
    p = np.exp(top)
    mass = (p * is_token).sum(1) + np.exp(apart)
    if mass.max() > 1 + _EXCESS:
        raise UnusableError(f"its probabilities at position {mass.argmax()} sum to {mass.max():.3f}, which is above 1")
    bound = num_others * p[:, -1] + (p * ~is_token).sum(1)
    with np.errstate(divide="ignore"):
        return np.log(np.minimum(np.maximum(1 - mass, _NOISE), bound))


def _checked(log_p: Sequence[Any]) -> _Floats:
    """Return log-probabilities as an array. Raises UnusableError where one is none."""
    try:
        found = np.asarray(log_p, np.float64).reshape(len(log_p))
    except (TypeError, ValueError, OverflowError) as error:
        wrong = next((each for each in log_p if not isinstance(each, int | float)), log_p[0])
        raise UnusableError(f"{shown(wrong)} is no log-probability") from error
    if len(wrong_ones := found[~(found <= ROUNDING)]):
        raise UnusableError(f"{shown(float(wrong_ones[0]))} is no log-probability")
    return np.where(found <= _LEAST, -np.inf, np.minimum(found, 0.0))


def _ids(ids: Sequence[Any]) -> NDArray[np.int64]:
    try:
        found = np.asarray(ids, np.int64).reshape(len(ids))
    except (TypeError, ValueError, OverflowError) as error:
        raise UnusableError("it names tokens by what are no ids") from error
    if len(found) and found.min() < 0:
        raise UnusableError(f"{found.min()} is no token id")
    return found
