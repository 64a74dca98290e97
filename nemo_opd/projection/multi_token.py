"""Tokens that the other side spells with several tokens (methods.md §2.2, §2.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.projection.entries import Entries, check_width, with_entries
from nemo_opd.projection.matrix import ProjectionMatrix
from nemo_opd.projection.pair import TokenizerPair, pair_of
from nemo_opd.projection.spelling import Progress, spell_with

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_DECAY = 0.1
"""Weight of a piece relative to the previous one: 0.9, 0.09, 0.009, …"""


def add_multi_token(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    width: int,
    reverse: bool = False,
    progress: Progress | None = None,
) -> ProjectionMatrix:
    """Fill each empty row of a text token with the teacher's pieces of its bytes, with weight ∝ 0.9·0.1^i for the i-th.

    `reverse`: the student spells each teacher text token without an exact partner, and the i-th piece gets an entry for
    that token with 0.9·0.1^i, except in rows of exact or special tokens. Ties put the teacher's own spelling first.
    Rows are cut to the `width` heaviest entries and have sum 1.

    Raises ProjectionError for width < 1 and tokenizers of another pair, AlignmentError for inexact tokenizers.
    """
    pair = pair_of(matrix, student_tokenizer, teacher_tokenizer)
    return multi_token_pass(matrix, pair, width=width, reverse=reverse, progress=progress)


def multi_token_pass(
    matrix: ProjectionMatrix, pair: TokenizerPair, *, width: int, reverse: bool, progress: Progress | None
) -> ProjectionMatrix:
    check_width("width", width)
    open_rows = pair.student.is_text & ~matrix.exact
    missing = np.flatnonzero(open_rows & (matrix.row_lengths == 0))
    unpaired = pair.teacher.is_text.copy()
    unpaired[matrix.shared_pairs[:, 1]] = False
    unpaired_ids = np.flatnonzero(unpaired) if reverse else np.empty(0, np.int64)

    total = len(missing) + len(unpaired_ids)
    spelled = spell_with(pair.teacher, _select(pair.student.contents, missing), _offset_progress(progress, 0, total))
    direct = _decaying_entries(missing[spelled.content], spelled.ids, spelled.place, later=False)
    spelled = spell_with(
        pair.student, _select(pair.teacher.contents, unpaired_ids), _offset_progress(progress, len(missing), total)
    )
    symmetric = _decaying_entries(spelled.ids, unpaired_ids[spelled.content], spelled.place, later=True)

    entries = Entries.concatenate(direct, symmetric.where(open_rows[symmetric.rows]))
    indices, weights = with_entries(matrix, np.unique(entries.rows), entries, width)
    options = matrix.options.after("multi_token", width=width, decay=_DECAY, reverse=reverse)
    return replace(matrix, indices=indices, weights=weights, options=options)


def _select(contents: Sequence[bytes], ids: NDArray[np.int64]) -> list[bytes]:
    return [contents[token_id] for token_id in ids.tolist()]


def _offset_progress(progress: Progress | None, done_before: int, total: int) -> Progress | None:
    return None if progress is None else lambda done, _: progress(done_before + done, total)


def _decaying_entries(
    rows: NDArray[np.int64], columns: NDArray[np.int64], place: NDArray[np.int64], *, later: bool
) -> Entries:
    return Entries(rows, columns, (1 - _DECAY) * _DECAY ** place.astype(np.float64), np.full(len(rows), later))
