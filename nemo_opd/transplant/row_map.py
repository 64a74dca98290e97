"""Sparse map from the rows of a new vocabulary to rows of the old one (methods.md §2.9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment import RoleOverrides
from nemo_opd.alignment.pieces import HOLE
from nemo_opd.projection.exact import exact_pass
from nemo_opd.projection.pair import Side, read_pair
from nemo_opd.projection.spelling import spell_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Weighting = Literal["uniform", "bytes", "first", "last"]
"""Weights of the old tokens that spell a new one: equal, proportional to their bytes, or (up to normalization) 1, 0.1,
0.01, … from the first or from the last.
"""
UNUSED, UNREACHED, SUMMED, ROLE, EXACT = range(5)
"""Kinds of rows: an id without a token; a token that old tokens cannot spell; a token spelled by several; a special
token with the role of an old one; a token with the bytes of an old one.
"""
_DECAY = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """R [V, W], sparse and row-stochastic: rows of the new vocabulary as combinations of old rows."""

    starts: NDArray[np.int64]
    """[V + 1]: row v has the entries starts[v] to starts[v + 1], none if it is unused or unreached."""
    columns: NDArray[np.int64]
    """[N]: old ids; an id may occur twice in a row."""
    weights: NDArray[np.float64]
    """[N]: sums to 1 in each row with entries."""
    kinds: NDArray[np.uint8]
    """[V]: kind of each row."""
    old_tokens: NDArray[np.int64]
    """Ascending old ids that are tokens and have a row; means and deviations are computed over them."""

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def copied(self) -> NDArray[np.int64]:
        """New ids with one entry, whose rows are exact copies of old rows."""
        return np.flatnonzero(np.diff(self.starts) == 1)


def build_row_map(
    new_tokenizer: PreTrainedTokenizerBase,
    old_tokenizer: PreTrainedTokenizerBase,
    num_old_rows: int,
    *,
    weighting: Weighting = "bytes",
    roles: RoleOverrides | None = None,
) -> RowMap:
    """Map each new id to the old token with its bytes or role, or else to the old tokens that spell its bytes.

    num_old_rows: rows of the model's matrices. A new token that needs an old token beyond them, which the model cannot
    read, counts as unreached. Raises AlignmentError if the tokenizers' pieces cannot be exact.
    """
    pair = read_pair(new_tokenizer, old_tokenizer, roles)
    new, old = pair.student, pair.teacher
    exact = exact_pass(pair)
    partner = exact.indices[:, 0].astype(np.int64)
    kinds = np.where(new.pieces.origin == HOLE, UNUSED, UNREACHED).astype(np.uint8)
    kinds[partner >= 0] = EXACT
    kinds[list(pair.special.best)] = ROLE
    rows = np.flatnonzero(partner >= 0)
    columns, weights = partner[rows], np.ones(len(rows))

    missing = np.flatnonzero(new.is_text & (partner < 0) & (kinds == UNREACHED))
    spelled = spell_with(old, [new.contents[i] for i in missing.tolist()])
    kinds[missing[np.unique(spelled.content)]] = SUMMED
    shares = _shares(spelled.content, spelled.place, old.pieces.lengths[spelled.ids], weighting)
    rows = np.concatenate([rows, missing[spelled.content]])
    columns, weights = np.concatenate([columns, spelled.ids]), np.concatenate([weights, shares])

    unreadable = np.unique(rows[columns >= num_old_rows])
    kinds[unreadable] = UNREACHED
    is_readable = ~np.isin(rows, unreadable)
    order = np.argsort(rows[is_readable], kind="stable")
    counts = np.bincount(rows[is_readable], minlength=len(kinds))
    return RowMap(
        starts=np.concatenate([[0], np.cumsum(counts)]),
        columns=columns[is_readable][order],
        weights=weights[is_readable][order],
        kinds=kinds,
        old_tokens=_tokens(old, num_old_rows),
    )


def _shares(
    content: NDArray[np.int64], place: NDArray[np.int64], num_bytes: NDArray[np.int32], weighting: Weighting
) -> NDArray[np.float64]:
    """Return the weight of each old token, normalized per content. place: index of the token in its content."""
    if not len(content):
        return np.zeros(0)
    counts = np.bincount(content)
    match weighting:
        case "uniform":
            raw = np.ones(len(content))
        case "bytes":
            raw = num_bytes.astype(np.float64)
        case "first":
            raw = _DECAY ** place.astype(np.float64)
        case "last":
            raw = _DECAY ** (counts[content] - 1 - place).astype(np.float64)
    return raw / np.bincount(content, raw)[content]


def _tokens(side: Side, num_rows: int) -> NDArray[np.int64]:
    ids = np.flatnonzero(side.pieces.origin != HOLE)
    return ids[ids < num_rows]
