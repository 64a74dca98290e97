"""A tokenizer's model alone, for pieces that are not text of their own (methods.md §2.2)."""

from __future__ import annotations

import json
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from nemo_opd.alignment.backend import META_SPACE
from nemo_opd.alignment.pieces import BYTE_FALLBACK, CHARACTER_OF_BYTE, Pieces

_STRAY_BYTES = re.compile("([\udc80-\udcff]+)")
"""What `surrogateescape` makes of bytes that are no characters."""


class RawModel:
    """Merges or Viterbi without normaliser, pre-tokenizer and added tokens, on the bytes of a piece.

    Half a character stays bytes: in the byte-level alphabet like any other, in SentencePiece as `<0xHH>`.
    """

    def __init__(self, backend: Tokenizer, pieces: Pieces) -> None:
        self._model = backend.model
        self._is_byte_level = _writes_byte_alphabet(json.loads(backend.decoder.__getstate__()))
        fallback = np.flatnonzero(pieces.origin == BYTE_FALLBACK).tolist()
        self._fallback = {
            pieces.bytes_of(token_id)[0]: token_id for token_id in reversed(fallback) if pieces.lengths[token_id]
        }

    def encode(self, piece: bytes) -> list[int]:
        """Ids for the piece; they spell something else, or nothing, where the vocabulary lacks one of its bytes."""
        if self._is_byte_level:
            return self._ids("".join([CHARACTER_OF_BYTE[byte] for byte in piece]))
        text = piece.decode("utf-8", "surrogateescape").replace(" ", META_SPACE)
        ids: list[int] = []
        for place, part in enumerate(_STRAY_BYTES.split(text)):
            if place % 2:
                ids += [
                    self._fallback[byte] for byte in part.encode("utf-8", "surrogateescape") if byte in self._fallback
                ]
            else:
                ids += self._ids(part)
        return ids

    def _ids(self, text: str) -> list[int]:
        return [token.id for token in self._model.tokenize(text)] if text else []


def _writes_byte_alphabet(decoder: dict[str, Any]) -> bool:
    return decoder["type"] == "ByteLevel" or any(map(_writes_byte_alphabet, decoder.get("decoders", ())))
