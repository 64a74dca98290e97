"""The exact bytes of every token id (METHODS §1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from nemo_opd.alignment.backend import META_SPACE, Backend, name_of, read_backend, rust_tokenizer
from nemo_opd.alignment.backend import fingerprint as fingerprint_of
from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

HOLE, ORDINARY, BYTE_FALLBACK, ADDED = range(4)
"""Where an id comes from; of ids with the same bytes the lower number is the more natural one."""

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SAMPLE = (
    "The quick brown fox; it's 1 of 12,345 (x != y)!\n\n\tdef f(x):  # 100 %\r\n        return x",
    "Größe naïve Čeština año 東京タワー 漢字かな交じり文 한국어 你好，世界。",
    "Русский текст עברית العربية हिन्दी ไทย Ελληνικά",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ½ ∑ → 𝔘 e\u0301 \u200b\u00a0\u3000 \U00010348 ﬁ",
)


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """id → bytes. Special tokens, the unknown token and holes in the vocabulary have none."""

    buffer: NDArray[np.uint8]
    """The bytes of all ids, one after the other."""
    offsets: NDArray[np.int64]
    """[V + 1]: id's bytes are buffer[offsets[id] : offsets[id + 1]]."""
    lengths: NDArray[np.int32]
    """[V]: bytes of an id."""
    is_special: NDArray[np.bool_]
    """[V]: marked special by the tokenizer, or its unknown token."""
    origin: NDArray[np.uint8]
    """[V]: HOLE, ORDINARY, BYTE_FALLBACK or ADDED."""
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""
        return len(self.lengths)

    def bytes_of(self, token_id: int) -> bytes:
        """Raises AlignmentError for an id outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise AlignmentError(f"token id {token_id} is outside the vocabulary of size {self.vocab_size}")
        return self.buffer[self.offsets[token_id] : self.offsets[token_id + 1]].tobytes()

    def as_list(self) -> list[bytes]:
        """The bytes of ids 0, 1, …, V−1."""
        data, ends = self.buffer.tobytes(), self.offsets.tolist()
        return [data[start:end] for start, end in pairwise(ends)]


_CACHE: dict[str, Pieces] = {}


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """The pieces of a fast tokenizer, built once per process and verified against the tokenizer's own decoder.

    Raises AlignmentError for a tokenizer whose pieces cannot be exact.
    """
    key = fingerprint_of(tokenizer)
    if key not in _CACHE:
        pieces = _build(read_backend(tokenizer))
        _verify(pieces, tokenizer)
        _CACHE[key] = pieces
    return _CACHE[key]


def _build(backend: Backend) -> Pieces:
    size = 1 + max([*backend.vocab.values(), *(token.id for token in backend.added)], default=-1)
    pieces = [b""] * size
    origin = np.zeros(size, np.uint8)
    is_special = np.zeros(size, np.bool_)
    for token, token_id in backend.vocab.items():
        pieces[token_id], origin[token_id] = _ordinary(token, backend)
    for added in backend.added:
        if origin[added.id] == HOLE:
            pieces[added.id], origin[added.id] = _added(added.stored, backend), ADDED
        is_special[added.id] = added.special
    if backend.unk_token in backend.vocab:
        is_special[backend.vocab[backend.unk_token]] = True
    for token_id in np.flatnonzero(is_special).tolist():
        pieces[token_id] = b""
    lengths = np.fromiter(map(len, pieces), np.int32, size)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    buffer = np.frombuffer(b"".join(pieces), np.uint8).copy()  # writable: Numba compiles anew for read-only arrays
    return Pieces(buffer, offsets, lengths, is_special, origin, backend.fingerprint)


def _ordinary(token: str, backend: Backend) -> tuple[bytes, int]:
    if backend.kind == "byte_level":
        return byte_level_bytes(token), ORDINARY
    fallback = _FALLBACK.fullmatch(token) if backend.byte_fallback else None
    if fallback:
        return bytes([int(fallback[1], 16)]), BYTE_FALLBACK
    return token.replace(META_SPACE, " ").encode(), ORDINARY


def _added(stored: str, backend: Backend) -> bytes:
    """Added tokens are text, never the byte alphabet."""
    return stored.encode() if backend.kind == "byte_level" else stored.replace(META_SPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's character for each byte: printable Latin-1 stands for itself, the rest follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF_CHARACTER = _byte_alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in BYTE_OF_CHARACTER.items()}


def byte_level_bytes(token: str) -> bytes:
    """Bytes of a piece in GPT-2's alphabet. A piece with any other character is plain text, as the decoder has it."""
    try:
        return bytes([BYTE_OF_CHARACTER[character] for character in token])
    except KeyError:
        return token.encode()


def _verify(pieces: Pieces, tokenizer: PreTrainedTokenizerBase) -> None:
    """The pieces of a sample must spell what the tokenizer decodes; a decoder may strip one dummy space."""
    backend = rust_tokenizer(tokenizer)
    for line in _SAMPLE:
        ids = [i for i in backend.encode(line, add_special_tokens=False).ids if not pieces.is_special[i]]
        spelled = b"".join(map(pieces.bytes_of, ids)).decode("utf-8", "replace")
        decoded = backend.decode(ids, skip_special_tokens=False)
        if spelled not in (decoded, " " + decoded):
            raise AlignmentError(
                f"tokenizer {name_of(tokenizer)} cannot be aligned by bytes: its tokens for {line!r} spell "
                f"{spelled!r}, but it decodes them to {decoded!r}"
            )
