"""BPE on the bytes of a piece, for pieces that are not text of their own (METHODS §2, step 2)."""

from __future__ import annotations

from itertools import pairwise

from nemo_opd.alignment.backend import META_SPACE, Backend
from nemo_opd.alignment.pieces import CHARACTER_OF_BYTE


class ByteBPE:
    """A tokenizer's merges without its normaliser, pre-tokenizer and added tokens.

    Half a character stays bytes: in the byte-level alphabet like any other, in SentencePiece as `<0xHH>`.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._rank = {pair: rank for rank, pair in enumerate(backend.merges)}

    def encode(self, piece: bytes) -> list[int] | None:
        """Ids that spell the piece, or None where the vocabulary lacks one of its bytes."""
        symbols = self._symbols(piece)
        while len(symbols) > 1:
            rank, place = min((self._rank.get(pair, len(self._rank)), i) for i, pair in enumerate(pairwise(symbols)))
            if rank == len(self._rank):
                break
            symbols[place : place + 2] = [symbols[place] + symbols[place + 1]]
        ids = [self._backend.vocab.get(symbol) for symbol in symbols]
        return None if None in ids else [token_id for token_id in ids if token_id is not None]

    def _symbols(self, piece: bytes) -> list[str]:
        if self._backend.kind == "byte_level":
            return [CHARACTER_OF_BYTE[byte] for byte in piece]
        symbols: list[str] = []
        for character in piece.decode("utf-8", "surrogateescape"):
            symbol = META_SPACE if character == " " else character
            if symbol in self._backend.vocab:
                symbols.append(symbol)
            else:
                symbols += [f"<0x{byte:02X}>" for byte in character.encode("utf-8", "surrogateescape")]
        return symbols
