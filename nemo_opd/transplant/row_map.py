"""Map from the rows of a new vocabulary to the old tokens that they are made of (methods.md §2.9)."""

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
"""Weights of the old tokens that spell a new one: equal, by their bytes, or 0.9, 0.09, … from the first or the last."""
UNUSED, UNREACHED, SUMMED, ROLE, EXACT = range(5)
"""Kinds of rows: an id that no token has; a token that no old token reaches; one that several spell; a special token
with the role of an old one; one with the bytes of an old one.
"""
_DECAY = 0.1


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """R [V, W], sparse and row-stochastic: a row of the new vocabulary → rows of the old one."""

    starts: NDArray[np.int64]
    """[V + 1]: the entries of row v are starts[v] to starts[v + 1]; none for rows that nothing reaches."""
    columns: NDArray[np.int64]
    """[N]: old ids; one may come twice in a row."""
    weights: NDArray[np.float64]
    """[N]: of sum 1 in each row with entries."""
    kinds: NDArray[np.uint8]
    """[V]"""
    old_tokens: NDArray[np.int64]
    """Old ids that are tokens and have a row, by id: what means and spreads are taken of."""

    def __len__(self) -> int:
        return len(self.kinds)

    @property
    def copied(self) -> NDArray[np.int64]:
        """New ids of one entry, whose rows are the old ones to the bit."""
        return np.flatnonzero(np.diff(self.starts) == 1)


def build_row_map(
    new_tokenizer: PreTrainedTokenizerBase,
    old_tokenizer: PreTrainedTokenizerBase,
    num_old_rows: int,
    *,
    weighting: Weighting = "bytes",
    roles: RoleOverrides | None = None,
) -> RowMap:
    """Map each new id to the old token of its bytes or role, else to all the old tokens that spell its bytes.

    num_old_rows: of the model's matrices. A row with an entry beyond them, of an old token that the model cannot read,
    is not reached. Raises AlignmentError for tokenizers whose pieces cannot be exact.
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
    kept = ~np.isin(rows, unreadable)
    order = np.argsort(rows[kept], kind="stable")
    counts = np.bincount(rows[kept], minlength=len(kinds))
    return RowMap(
        starts=np.concatenate([[0], np.cumsum(counts)]),
        columns=columns[kept][order],
        weights=weights[kept][order],
        kinds=kinds,
        old_tokens=_tokens(old, num_old_rows),
    )


def _shares(
    content: NDArray[np.int64], place: NDArray[np.int64], num_bytes: NDArray[np.int32], weighting: Weighting
) -> NDArray[np.float64]:
    """Return the weight of each piece, of sum 1 over those of a content. place: from 0 in each content."""
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
