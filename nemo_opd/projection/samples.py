"""Sample rows of a projection: a few student tokens of every kind, with the teacher tokens in their rows."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from nemo_opd.alignment.pieces import BYTE_FALLBACK, Pieces, pieces_of
from nemo_opd.errors import ProjectionError
from nemo_opd.projection.audit import CJK, is_partial_utf8
from nemo_opd.projection.matrix import ProjectionMatrix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

KINDS = ("numerals", "white space", "special", "CJK", "partial UTF-8", "several pieces")


@dataclass(frozen=True, slots=True)
class Entry:
    id: int
    token: str
    """Token as written by `shown_token`."""
    weight: float


@dataclass(frozen=True, slots=True)
class Sample:
    kind: str
    id: int
    token: str
    """Token as written by `shown_token`."""
    exact: bool
    entries: tuple[Entry, ...]


def samples(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    count: int = 6,
) -> list[Sample]:
    """Choose up to `count` rows of every kind, half of them exact if possible, ordered by kind and id.

    Raises ProjectionError for a negative count.
    """
    if count < 0:
        raise ProjectionError(f"{count} sample rows of each kind are not possible; give 0 or more")
    student, teacher = pieces_of(student_tokenizer), pieces_of(teacher_tokenizer)

    def sample(kind: str, token_id: int) -> Sample:
        entries = entries_of(matrix, token_id, teacher_tokenizer, teacher)
        token = shown_token(student_tokenizer, student, token_id)
        return Sample(kind, token_id, token, bool(matrix.exact[token_id]), entries)

    return [sample(kind, i) for kind, ids in _sample_ids(matrix, student, count).items() for i in ids]


def entries_of(
    matrix: ProjectionMatrix, token_id: int, teacher_tokenizer: PreTrainedTokenizerBase, teacher: Pieces
) -> tuple[Entry, ...]:
    """Return the entries of a student token's row."""
    row = zip(matrix.indices[token_id].tolist(), matrix.weights[token_id].tolist(), strict=True)
    return tuple(Entry(t, shown_token(teacher_tokenizer, teacher, t), weight) for t, weight in row if t >= 0)


def _sample_ids(matrix: ProjectionMatrix, pieces: Pieces, count: int) -> Mapping[str, Sequence[int]]:
    """Choose up to `count` student ids per kind, spread over the vocabulary; prefer special tokens with a row."""
    kinds: dict[str, list[int]] = {kind: [] for kind in KINDS}
    lengths = matrix.row_lengths
    for token_id, piece in enumerate(pieces.as_list()):
        if pieces.origin[token_id] == BYTE_FALLBACK and piece.isascii():
            continue  # twins of ordinary tokens, which would look like rows that lack their partner
        if kind := _kind(piece, bool(pieces.is_special[token_id]), bool(lengths[token_id] > 1)):
            kinds[kind].append(token_id)
    kinds["special"] = [i for i in kinds["special"] if lengths[i]] or kinds["special"]
    return {kind: _exact_and_other(matrix, ids, count) for kind, ids in kinds.items()}


def _kind(piece: bytes, is_special: bool, is_split: bool) -> str | None:
    if is_special:
        return "special"
    if piece.isdigit():
        return "numerals"
    if piece.isspace():
        return "white space"
    if is_partial_utf8(piece):
        return "partial UTF-8"
    if CJK.search(piece.decode()):
        return "CJK"
    return "several pieces" if is_split else None


def _exact_and_other(matrix: ProjectionMatrix, ids: Sequence[int], count: int) -> Sequence[int]:
    """Choose half exact and half other ids; fill up with one kind if the other kind has too few."""
    exact = [i for i in ids if matrix.exact[i]]
    inexact = [i for i in ids if not matrix.exact[i]]
    num_exact = min(len(exact), max(count // 2, count - len(inexact)))
    return sorted([*_spread(exact, num_exact), *_spread(inexact, count - num_exact)])


def _spread(ids: Sequence[int], count: int) -> Sequence[int]:
    places = np.linspace(0, len(ids) - 1, min(count, len(ids))).round().astype(int)
    return [ids[place] for place in places]


def counted_runs(token: str) -> str:
    """Write a token of `shown_token` with spaces as ␣, and more than three equal white-space signs as ␣×26 or \\n×5."""
    return re.sub(r"(␣|\\[ntr])\1{3,}", lambda run: f"{run[1]}×{len(run[0]) // len(run[1])}", token.replace(" ", "␣"))


def shown_token(tokenizer: PreTrainedTokenizerBase, pieces: Pieces, token_id: int) -> str:
    """Write a token in quotes, bytes that are not characters as \\x.., special tokens by name."""
    if pieces.is_special[token_id]:
        return str(tokenizer.convert_ids_to_tokens(token_id))
    piece = pieces.bytes_of(token_id)
    return repr(piece) if is_partial_utf8(piece) else repr(piece.decode())
