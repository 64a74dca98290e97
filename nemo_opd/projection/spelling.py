"""Re-tokenization of byte strings that preserves every byte (methods.md §2.2)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_opd.alignment.backend import META_SPACE, rust_tokenizer
from nemo_opd.alignment.pieces import BYTE_FALLBACK, CHARACTER_OF_BYTE, Pieces
from nemo_opd.projection.pair import Side

Progress = Callable[[int, int], None]
"""Callback: (tokens done, all tokens)."""
_BATCH = 4096
_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")
"""Characters that `surrogateescape` makes of bytes that are not characters."""


@dataclass(frozen=True, slots=True, eq=False)
class _Spellings:
    """Ids that spell each content, concatenated."""

    ids: NDArray[np.int64]
    content: NDArray[np.int64]
    """Index of the content that an id belongs to."""
    place: NDArray[np.int64]
    """Index of an id within its content's spelling."""


def spell_with(side: Side, contents: Sequence[bytes], progress: Progress | None = None) -> _Spellings:
    """Return, for each content, the ids of `side` that spell exactly its bytes; without such ids, none.

    Text goes through the full tokenizer, so its digit and word rules hold. Contents that do not come back byte for byte
    (parts of characters, text that the normaliser changes, names of special tokens) go through its model alone.
    """
    backend = _without_truncation(rust_tokenizer(side.tokenizer))
    model = RawModel(backend, side.pieces)
    spelled: list[list[int]] = []
    for start in range(0, len(contents), _BATCH):
        batch = contents[start : start + _BATCH]
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
