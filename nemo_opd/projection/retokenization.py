"""Re-tokenization of byte strings that preserves every byte, and the passes that need it (methods.md §2.2, §2.3, §2.6):
multi-token rows, byte prefixes and shared prefixes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_opd.alignment.pieces import BYTE_FALLBACK, CHARACTER_OF_BYTE, META_SPACE, Pieces, rust_tokenizer
from nemo_opd.alignment.token_roles import RoleOverrides
from nemo_opd.projection.exact import Side, TokenizerPair, natural_order, pair_of
from nemo_opd.projection.matrix import Entries, ProjectionMatrix, check_width, with_entries

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
"""Callback: (tokens done, all tokens)."""
_CONTENTS_AT_A_TIME = 4096
_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")
"""Characters that `surrogateescape` makes of bytes that are not characters."""

_DECAY = 0.1
"""Weight of a piece relative to the previous one: 0.9, 0.09, 0.009, …"""

_SharedMaps = tuple[NDArray[np.int32], NDArray[np.int32]]
"""A row of `shared_pairs` for each token of student and teacher, −1 for none."""
_Pieces = list[list[int]]
"""Student tokens of each teacher token; empty for a token without an image."""


@dataclass(frozen=True, slots=True, eq=False)
class _Spellings:
    """Ids that spell each content, concatenated."""

    ids: NDArray[np.int64]
    content: NDArray[np.int64]
    """Index of the content that an id belongs to."""
    place: NDArray[np.int64]
    """Index of an id within its content's spelling."""


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


def add_byte_prefix(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Set `byte_prefix` [W], the longest student text token whose bytes begin the teacher token's.

    Also set `teacher_byte_order` [W, 3], with which the byte_prefix loss finds the tokens that begin with another
    token, the student tokens that spell each teacher token, and the bytes of both sides' tokens.

    Among student ids with the same bytes, the exact partner is preferred, then the most natural id. Tokens that stand
    for a role map to the student token with the closest role. Tokens without such a student token, and holes, have −1.

    `roles` default to the matrix's. Raises ProjectionError for tokenizers of another pair.
    """
    return byte_prefix_pass(matrix, pair_of(matrix, student_tokenizer, teacher_tokenizer, roles))


def byte_prefix_pass(matrix: ProjectionMatrix, pair: TokenizerPair) -> ProjectionMatrix:
    student, teacher = pair.student, pair.teacher
    ids: dict[bytes, int] = {}
    for s in natural_order(student.pieces, student.is_text):
        ids.setdefault(student.contents[s], s)
    byte_prefix = _longest_prefixes(teacher, ids)
    single = {
        t: s
        for s, t in matrix.shared_pairs.tolist()
        if teacher.is_text[t] and student.is_text[s] and student.contents[s] == teacher.contents[t]
    } | dict(pair.nearest_student)
    for t, s in single.items():
        byte_prefix[t] = s
    student_contents, contents = student.text_contents, teacher.text_contents
    mapped = replace(
        matrix,
        byte_prefix=byte_prefix,
        teacher_byte_order=byte_order(contents),
        student_bytes=_flat(student_contents),
        student_byte_ends=_ends(student_contents),
        teacher_bytes=_flat(contents),
        teacher_byte_ends=_ends(contents),
        options=matrix.options.after("byte_prefix", roles=pair.roles),
    )
    return _with_teacher_pieces(mapped, pair, ids, single)


def byte_order(pieces: Sequence[bytes]) -> NDArray[np.int32]:
    """Return [W, 3] from the bytes of each token: the tokens in byte order, and two bounds for each (methods.md §5.7).

    Column 0: the tokens in byte order, tokens without bytes last. Columns 1 and 2: the tokens whose bytes begin with
    token t's are order[begin[t] : end[t]]; for a token without bytes, that is the token itself.
    """
    texts = sorted((piece, token) for token, piece in enumerate(pieces) if piece)
    order = np.array([token for _, token in texts] + [t for t, piece in enumerate(pieces) if not piece], np.int64)
    begin = np.argsort(order)
    end = begin + 1
    open_tokens: list[tuple[bytes, int]] = []
    for at, (piece, token) in enumerate(texts):
        while open_tokens and not piece.startswith(open_tokens[-1][0]):
            end[open_tokens.pop()[1]] = at
        if open_tokens and open_tokens[-1][0] == piece:
            begin[token] = begin[open_tokens[-1][1]]
        open_tokens.append((piece, token))
    for _, token in open_tokens:
        end[token] = len(texts)
    return np.stack([order, begin, end], axis=1).astype(np.int32)


def _longest_prefixes(side: Side, values: Mapping[bytes, int]) -> NDArray[np.int32]:
    """Return, for each id, the value of its longest prefix among the keys; −1 for ids without one or without text."""
    longest = max(map(len, values), default=0)
    prefixes = np.full(len(side.is_text), -1, np.int32)
    for token_id in np.flatnonzero(side.is_text).tolist():
        content = side.contents[token_id]
        for length in range(min(len(content), longest), 0, -1):
            value = values.get(content[:length])
            if value is not None:
                prefixes[token_id] = value
                break
    return prefixes


def _with_teacher_pieces(
    matrix: ProjectionMatrix, pair: TokenizerPair, ids: Mapping[bytes, int], single: Mapping[int, int]
) -> ProjectionMatrix:
    """Set the pieces of the teacher's tokens in both forms.

    ids: student tokens keyed by their bytes. single: teacher token → the student token that is its only piece. Other
    text tokens have the pieces of the student's tokenizer or, if these do not come back byte for byte, the longest
    student tokens from the left.
    """
    teacher = pair.teacher
    several = [t for t in np.flatnonzero(teacher.is_text).tolist() if t not in single and teacher.contents[t]]
    contents = [teacher.contents[t] for t in several]
    longest = max(map(len, ids), default=0)
    prefixes: _Pieces = [[] for _ in teacher.contents]
    for t, s in single.items():
        prefixes[t] = [s]
    for t, content in zip(several, contents, strict=True):
        prefixes[t] = _longest_first(content, ids, longest)
    spellings = list(prefixes)
    spelled = spell_with(pair.student, contents)
    ids_of_spellings = iter(spelled.ids.tolist())
    for t, length in zip(several, np.bincount(spelled.content, minlength=len(several)).tolist(), strict=True):
        if length:
            spellings[t] = list(islice(ids_of_spellings, length))
    return replace(
        matrix,
        teacher_spellings=_flat(spellings),
        teacher_spelling_ends=_ends(spellings),
        teacher_prefix_pieces=_flat(prefixes),
        teacher_prefix_ends=_ends(prefixes),
    )


def _longest_first(content: bytes, ids: Mapping[bytes, int], longest: int) -> list[int]:
    """Cut bytes into the longest known tokens from the left, up to bytes that no token begins."""
    pieces, start = [], 0
    while start < len(content):
        lengths = range(min(len(content) - start, longest), 0, -1)
        length = next((length for length in lengths if content[start : start + length] in ids), 0)
        if not length:
            break
        pieces.append(ids[content[start : start + length]])
        start += length
    return pieces


def _flat(pieces: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    return np.fromiter(chain.from_iterable(pieces), np.int32)


def _ends(pieces: Sequence[Sequence[int]]) -> NDArray[np.int32]:
    return np.fromiter(accumulate(map(len, pieces)), np.int32, len(pieces))


def add_shared_prefix(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Set `student_shared_prefix` [V] and `teacher_shared_prefix` [W]: rows of `shared_pairs`, −1 for the rest cell.

    A text token maps to the longest shared text token whose bytes begin its bytes: its own pair, if it has one. A token
    that stands for a role maps to the pair with the closest role, otherwise to the rest cell.

    Also set `student_shared_spelling` [V] and `teacher_shared_spelling` [W]. There a text token that is not shared maps
    where the first token of its spelling by the other tokenizer maps; if it has no spelling, to the longest shared
    token that begins it.

    `roles` default to the matrix's. Raises ProjectionError for tokenizers of another pair.
    """
    return shared_prefix_pass(matrix, pair_of(matrix, student_tokenizer, teacher_tokenizer, roles))


def shared_prefix_pass(matrix: ProjectionMatrix, pair: TokenizerPair) -> ProjectionMatrix:
    shared = matrix.shared_pairs
    pair_of_student = {s: place for place, s in enumerate(shared[:, 0].tolist())}
    pair_of_teacher = {t: place for place, t in enumerate(shared[:, 1].tolist())}
    pair_of_bytes = _shared_bytes(pair, shared, pair_of_student)
    prefixes = _longest_prefixes(pair.student, pair_of_bytes), _longest_prefixes(pair.teacher, pair_of_bytes)
    spellings = _shared_spellings(pair, prefixes, pair_of_bytes)
    for student, teacher in (prefixes, spellings):
        student[shared[:, 0]] = teacher[shared[:, 1]] = np.arange(len(shared))
        for s, t in pair.special.best.items():
            student[s] = pair_of_student.get(s, pair_of_teacher.get(t, -1))
        for t, s in pair.nearest_student.items():
            teacher[t] = pair_of_teacher.get(t, pair_of_student.get(s, -1))
    return replace(
        matrix,
        student_shared_prefix=prefixes[0],
        teacher_shared_prefix=prefixes[1],
        student_shared_spelling=spellings[0],
        teacher_shared_spelling=spellings[1],
        options=matrix.options.after("shared_prefix", roles=pair.roles),
    )


def _shared_spellings(pair: TokenizerPair, prefixes: _SharedMaps, pair_of_bytes: Mapping[bytes, int]) -> _SharedMaps:
    """Map text tokens of both sides by the first pieces of their spellings. prefixes: the maps by longest prefix."""
    sides = pair.student, pair.teacher
    maps = prefixes[0].copy(), prefixes[1].copy()
    unshared: list[tuple[int, int, int, int]] = []
    for k, side in enumerate(sides):
        tokens = [t for t in np.flatnonzero(side.is_text).tolist() if side.contents[t] not in pair_of_bytes]
        spelled = spell_with(sides[1 - k], _select(side.contents, np.array(tokens, np.int64)))
        is_first = spelled.place == 0
        first_pieces = zip(spelled.content[is_first].tolist(), spelled.ids[is_first].tolist(), strict=True)
        unshared += [(len(side.contents[tokens[n]]), k, tokens[n], piece) for n, piece in first_pieces]
    # A first piece is shorter than its token, as tokens with the same bytes are shared, so it is mapped before it.
    for _, k, token, piece in sorted(unshared):
        maps[k][token] = maps[1 - k][piece]
    return maps


def _shared_bytes(
    pair: TokenizerPair, shared: NDArray[np.int32], pair_of_student: Mapping[int, int]
) -> dict[bytes, int]:
    """Map the bytes of shared text tokens to their pair; among pairs with the same bytes, to the most natural one."""
    student, teacher = pair.student, pair.teacher
    is_shared = np.zeros(len(student.is_text), np.bool_)
    is_shared[shared[:, 0]] = student.is_text[shared[:, 0]] & teacher.is_text[shared[:, 1]]
    pair_of_bytes: dict[bytes, int] = {}
    for s in natural_order(student.pieces, is_shared):
        place = pair_of_student[s]
        if student.contents[s] == teacher.contents[int(shared[place, 1])]:
            pair_of_bytes.setdefault(student.contents[s], place)
    return pair_of_bytes


def spell_with(side: Side, contents: Sequence[bytes], progress: Progress | None = None) -> _Spellings:
    """Return, for each content, the ids of `side` that spell exactly its bytes; without such ids, none.

    Text goes through the full tokenizer, so its digit and word rules hold. Contents that do not come back byte for byte
    (parts of characters, text that the normaliser changes, names of special tokens) go through its model alone.
    """
    backend = _without_truncation(rust_tokenizer(side.tokenizer))
    model = RawModel(backend, side.pieces)
    spelled: list[list[int]] = []
    for start in range(0, len(contents), _CONTENTS_AT_A_TIME):
        batch = contents[start : start + _CONTENTS_AT_A_TIME]
        texts = [content.decode("utf-8", "replace") for content in batch]
        for content, encoding in zip(batch, backend.encode_batch_fast(texts, add_special_tokens=False), strict=True):
            spelled.append(
                _spelling(side.contents, encoding.ids, content)
                or _spelling(side.contents, model.encode(content), content)
            )
        if progress is not None:
            progress(len(spelled), len(contents))
    lengths = np.fromiter(map(len, spelled), np.int64, len(spelled))
    ends = np.cumsum(lengths)
    ids = np.fromiter(chain.from_iterable(spelled), np.int64, lengths.sum())
    return _Spellings(
        ids,
        np.repeat(np.arange(len(spelled)), lengths),
        np.arange(len(ids)) - np.repeat(ends - lengths, lengths),
    )


class RawModel:
    """A tokenizer's merges or Viterbi on the bytes of a piece, without normaliser, pre-tokenizer and added tokens.

    Parts of characters stay bytes: written in the byte-level alphabet, or by SentencePiece as `<0xHH>`.
    """

    def __init__(self, backend: Tokenizer, pieces: Pieces) -> None:
        self._model = backend.model
        self._is_byte_level = _writes_byte_alphabet(json.loads(backend.decoder.__getstate__()))
        fallback = np.flatnonzero(pieces.origin == BYTE_FALLBACK).tolist()
        self._fallback = {
            pieces.bytes_of(token_id)[0]: token_id for token_id in reversed(fallback) if pieces.lengths[token_id]
        }

    def encode(self, piece: bytes) -> list[int]:
        """Return ids for the piece. They spell less or something else if the vocabulary lacks one of its bytes."""
        if self._is_byte_level:
            return self._ids("".join([CHARACTER_OF_BYTE[byte] for byte in piece]))
        text = piece.decode("utf-8", "surrogateescape").replace(" ", META_SPACE)
        ids: list[int] = []
        for place, part in enumerate(_STRAY_BYTES.split(text)):
            if place % 2:
                stray = part.encode("utf-8", "surrogateescape")
                ids += [self._fallback[byte] for byte in stray if byte in self._fallback]
            else:
                ids += self._ids(part)
        return ids

    def _ids(self, text: str) -> list[int]:
        return [token.id for token in self._model.tokenize(text)] if text else []


def _spelling(pieces: list[bytes], ids: list[int], content: bytes) -> list[int]:
    """Return the ids if they spell the content, otherwise an empty list."""
    return ids if b"".join([pieces[token_id] for token_id in ids]) == content else []


def _writes_byte_alphabet(decoder: dict[str, Any]) -> bool:
    return decoder["type"] == "ByteLevel" or any(map(_writes_byte_alphabet, decoder.get("decoders", ())))


def _without_truncation(backend: Tokenizer) -> Tokenizer:
    """Return a backend that does not cut or pad; copy it, which takes a second, only if needed."""
    if backend.truncation is None and backend.padding is None:
        return backend
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
