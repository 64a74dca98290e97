"""Exact bytes of every token id (methods.md §1.1), read from a fast tokenizer's serialised backend."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_Kind = Literal["byte_level", "sentencepiece"]
META_SPACE = "▁"
_MERGES = '"merges":['
"""Start of the list of merges, and of nothing else: quotation marks inside a JSON string are escaped."""
_END_OF_MODEL = "]}}"

HOLE, ORDINARY, BYTE_FALLBACK, ADDED = range(4)
"""Origins of ids. If two ids have the same bytes, the lower origin is the more natural one."""

_FALLBACK = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_ANCHOR = re.compile(rb"[A-Za-z0-9]+")
_SAMPLE = (
    "The quick brown fox; it's 1 of 12,345 (x != y)!\n\n\tdef f(x):  # 100 %\r\n        return x",
    "Hello , world ! I 'm here . do n't ; \" quoted \" ? NASA McDonald aa  bb   cc",
    "Größe naïve Čeština año 東京タワー 漢字かな交じり文 한국어 你好，世界。",
    "Русский текст עברית العربية हिन्दी ไทย Ελληνικά",
    "👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 ½ ∑ → 𝔘 e\u0301 \u200b\u00a0\u3000 \U00010348 ﬁ",
)
_MAX_IDS = 1 << 24
"""Sixty times the size of the largest vocabularies: a table of pieces has a row for each id."""
_MODEL_OPTIONS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)
"""Attributes of a backend's model, besides tokens and merges."""
_CACHE: dict[str, Pieces] = {}
_FINGERPRINTS: WeakKeyDictionary[PreTrainedTokenizerBase, tuple[object, str]] = WeakKeyDictionary()
"""Tokenizer → its state, as `_state` returns it, and its fingerprint."""


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Map from id to bytes, which are empty for special tokens, the unknown token and holes in the vocabulary."""

    buffer: NDArray[np.uint8]
    """Concatenated bytes of all ids."""
    offsets: NDArray[np.int64]
    """[V + 1]: id's bytes are buffer[offsets[id] : offsets[id + 1]]."""
    lengths: NDArray[np.int32]
    """[V]: number of bytes per id."""
    is_special: NDArray[np.bool_]
    """[V]: whether the tokenizer marks the id special, or it is its unknown token."""
    origin: NDArray[np.uint8]
    """[V]: HOLE, ORDINARY, BYTE_FALLBACK or ADDED."""
    special_contents: Mapping[int, bytes]
    """Special id → bytes of the text that spells it."""
    fingerprint: str

    @property
    def vocab_size(self) -> int:
        """Largest id + 1."""
        return len(self.lengths)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes of an id. Raises AlignmentError for one outside the vocabulary."""
        if not 0 <= token_id < self.vocab_size:
            raise AlignmentError(f"token id {token_id} is outside the vocabulary of size {self.vocab_size}")
        return self.buffer[self.offsets[token_id] : self.offsets[token_id + 1]].tobytes()

    def content_of(self, token_id: int) -> bytes:
        """Return the bytes of the text that spells an id, even if it is special; empty for the unknown token."""
        return self.special_contents.get(token_id) or self.bytes_of(token_id)

    def as_list(self) -> list[bytes]:
        """Return the bytes of ids 0, 1, …, V−1."""
        data, ends = self.buffer.tobytes(), self.offsets.tolist()
        return [data[start:end] for start, end in pairwise(ends)]


def pieces_of(tokenizer: PreTrainedTokenizerBase) -> Pieces:
    """Return the pieces of a fast tokenizer, built once per process.

    Every piece, and the pieces of sample texts, spell the text that the tokenizer decodes.

    Raises AlignmentError for a tokenizer whose pieces cannot be exact.
    """
    identity = fingerprint(tokenizer)
    if identity not in _CACHE:
        backend = read_backend(tokenizer)
        pieces, rust = _build(backend), rust_tokenizer(tokenizer)
        if problem := _wrong_piece(pieces, backend.kind, rust) or _wrong_text(pieces, rust):
            raise AlignmentError(
                f"tokenizer {name_of(tokenizer)} cannot be aligned by bytes: {problem}; "
                "choose a model whose tokenizer decodes its tokens to the text they stand for"
            )
        _CACHE[identity] = pieces
    return _CACHE[identity]


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer's behaviour, except truncation and padding, which calls set.

    Raises AlignmentError for a tokenizer without a fast backend.
    """
    state = _state(rust_tokenizer(tokenizer))
    if _FINGERPRINTS.get(tokenizer, (None,))[0] != state:
        _FINGERPRINTS[tokenizer] = state, _serialize(tokenizer)[1]
    return _FINGERPRINTS[tokenizer][1]


def _state(backend: Tokenizer) -> object:
    """Return what changes with a backend's behaviour, unless its model is replaced by one of the same size.

    It takes milliseconds, and serialising takes up to a second.
    """
    parts = (backend.normalizer, backend.pre_tokenizer, backend.decoder, backend.post_processor)
    states = [None if part is None else part.__getstate__() for part in parts]
    model = backend.model
    options = [getattr(model, name, None) for name in _MODEL_OPTIONS]
    return backend.get_vocab_size(), repr(backend.get_added_tokens_decoder()), states, options


def rust_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the backend of a fast tokenizer. Raises AlignmentError for a slow tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise AlignmentError(
            f"tokenizer {name_of(tokenizer)} ({type(tokenizer).__name__}) has no fast backend, so the bytes of its "
            "tokens are unknown; use a version of it that ships tokenizer.json"
        )
    return backend


@dataclass(frozen=True, slots=True)
class _AddedToken:
    id: int
    stored: str
    """The content as the normaliser left it, which is matched in texts and decoded. White space that the token swallows
    around itself (lstrip, rstrip) is excluded.
    """
    special: bool
    in_byte_alphabet: bool
    """Whether the normaliser wrote the content in the GPT-2 alphabet."""


@dataclass(frozen=True)
class _Backend:
    """The parts of a tokenizer's backend that determine which bytes a token stands for."""

    kind: _Kind
    """byte_level: the GPT-2 alphabet, one character per byte. sentencepiece: UTF-8 with `▁` for a space."""
    byte_fallback: bool
    """`<0xHH>` stands for one byte."""
    vocab: dict[str, int]
    """The model's own pieces, which may include added tokens."""
    merges_json: str
    """List of pairs. Parsed on demand, since it takes most of the parsing time."""
    unk_token: str | None
    added: tuple[_AddedToken, ...]
    fingerprint: str

    @cached_property
    def merges(self) -> tuple[tuple[str, str], ...]:
        """BPE merges in the order of application; empty for a unigram model."""
        return tuple((left, right) for left, right in json.loads(self.merges_json))


def read_backend(tokenizer: PreTrainedTokenizerBase) -> _Backend:
    """Read a tokenizer's backend.

    Raises AlignmentError if a token's bytes cannot be told from its text.
    """
    backend = rust_tokenizer(tokenizer)
    text, behaviour = _serialize(tokenizer)
    data, merges_json = _parse(text)
    model, decoders = data["model"], list(_steps(data["decoder"], "decoders"))
    try:
        kind = _kind(model, decoders)
    except AlignmentError as error:
        raise AlignmentError(f"tokenizer {name_of(tokenizer)} cannot be aligned by bytes: {error}") from None
    writes_alphabet = any(step["type"] == "ByteLevel" for step in _steps(data["normalizer"], "normalizers"))
    return _Backend(
        kind=kind,
        byte_fallback=kind == "sentencepiece" and any(d["type"] == "ByteFallback" for d in decoders),
        vocab=model["vocab"] if isinstance(model["vocab"], dict) else {p: i for i, (p, _) in enumerate(model["vocab"])},
        merges_json=merges_json,
        unk_token=_unk_token(model),
        added=tuple(
            _AddedToken(
                t["id"],
                backend.id_to_token(t["id"]) or t["content"],
                t["special"],
                kind == "byte_level" and writes_alphabet and t["normalized"],
            )
            for t in data["added_tokens"]
        ),
        fingerprint=behaviour,
    )


def _serialize(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str]:
    """Return the backend as JSON, and its fingerprint. Raises AlignmentError for a tokenizer without a fast one."""
    text = rust_tokenizer(tokenizer).to_str()
    # The version, truncation and padding precede this key.
    _, key, behaviour = text.partition('"added_tokens":')
    assert key, "a serialised tokenizer lists its added tokens"
    return text, hashlib.sha256(behaviour.encode()).hexdigest()


def _parse(text: str) -> tuple[dict[str, Any], str]:
    """Parse everything but the merges, and return the merges as JSON: the last list of the last object."""
    head, opening, tail = text.partition(_MERGES)
    if not opening:
        return json.loads(text), "[]"
    assert tail.endswith(_END_OF_MODEL), "a serialised tokenizer ends with its merges"
    return json.loads(head + _MERGES + _END_OF_MODEL), "[" + tail[: 1 - len(_END_OF_MODEL)]


def _steps(component: dict[str, Any] | None, key: str) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder or normaliser. key: key of the steps in a sequence."""
    if component is None:
        return
    if component["type"] == "Sequence":
        for inner in component[key]:
            yield from _steps(inner, key)
    else:
        yield component


def _kind(model: dict[str, Any], decoders: list[dict[str, Any]]) -> _Kind:
    if model["type"] not in ("BPE", "Unigram"):
        raise AlignmentError(
            f"a {model['type']} model drops white space and marks that its tokens cannot give back; "
            "choose a model whose tokenizer is a byte-level or SentencePiece BPE or Unigram"
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise AlignmentError(
                f"its model writes {key}={model[key]!r} into tokens that stand for other text; "
                "choose a model whose tokenizer is byte-level or SentencePiece"
            )
    if any(step["type"] == "ByteLevel" for step in decoders):
        return "byte_level"
    if any(_writes_spaces(step) for step in decoders):
        return "sentencepiece"
    types = ", ".join(step["type"] for step in decoders) or "none"
    raise AlignmentError(
        f"its decoder ({types}) is neither ByteLevel nor one that turns {META_SPACE!r} into a space; if its pieces are "
        "of one of these kinds, set backend_tokenizer.decoder to tokenizers.decoders.ByteLevel() or Metaspace()"
    )


def _writes_spaces(step: dict[str, Any]) -> bool:
    if step["type"] == "Metaspace":
        return step["replacement"] == META_SPACE
    return step["type"] == "Replace" and step["pattern"] == {"String": META_SPACE} and step["content"] == " "


def _unk_token(model: dict[str, Any]) -> str | None:
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]
    return model["unk_token"]


def _build(backend: _Backend) -> Pieces:
    size = 1 + max([*backend.vocab.values(), *(token.id for token in backend.added)], default=-1)
    if size > _MAX_IDS:
        raise AlignmentError(
            f"a token of the tokenizer has the id {size - 1:,}, and ids above {_MAX_IDS:,} are not read; its file is "
            "damaged, so copy it again"
        )
    pieces = [b""] * size
    origin = np.zeros(size, np.uint8)
    is_special = np.zeros(size, np.bool_)
    for token, token_id in backend.vocab.items():
        pieces[token_id], origin[token_id] = _ordinary_bytes(token, backend)
    for added in backend.added:
        if origin[added.id] == HOLE:
            pieces[added.id], origin[added.id] = _added_bytes(added, backend), ADDED
        is_special[added.id] = added.special
    if backend.unk_token in backend.vocab:
        is_special[backend.vocab[backend.unk_token]] = True
    special_contents = {added.id: _added_bytes(added, backend) for added in backend.added if added.special}
    for token_id in np.flatnonzero(is_special).tolist():
        pieces[token_id] = b""
    lengths = np.fromiter(map(len, pieces), np.int32, size)
    offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    buffer = np.frombuffer(b"".join(pieces), np.uint8).copy()  # writable: Numba recompiles for read-only arrays
    return Pieces(buffer, offsets, lengths, is_special, origin, special_contents, backend.fingerprint)


def _ordinary_bytes(token: str, backend: _Backend) -> tuple[bytes, int]:
    if backend.kind == "byte_level":
        return byte_level_bytes(token), ORDINARY
    if backend.byte_fallback and token.startswith("<0x") and (fallback := _FALLBACK.fullmatch(token)):
        return bytes([int(fallback[1], 16)]), BYTE_FALLBACK
    return token.replace(META_SPACE, " ").encode(), ORDINARY


def _added_bytes(token: _AddedToken, backend: _Backend) -> bytes:
    """Return the bytes of an added token: its text, or the bytes that it spells in the byte alphabet if the normaliser
    wrote it so.
    """
    if backend.kind == "byte_level":
        return byte_level_bytes(token.stored) if token.in_byte_alphabet else token.stored.encode()
    return token.stored.replace(META_SPACE, " ").encode()


def _wrong_piece(pieces: Pieces, kind: _Kind, backend: Tokenizer) -> str | None:
    """Describe a piece that the tokenizer decodes to other text. Each id is decoded between two anchors.

    All ids are decoded in one call first, then one by one to name the one that differs. Anchors keep the ids apart, so
    that parts of characters do not join, and away from the ends of the text, since decoders strip there. They are
    ordinary tokens because adjacent `<0xHH>` bytes are decoded together.
    """
    contents = pieces.as_list()
    ids = np.flatnonzero((pieces.origin != HOLE) & ~pieces.is_special).tolist()
    if kind == "byte_level":  # the decoder wrongly takes an added token such as `<é>` for the byte alphabet
        ids = [i for i in ids if pieces.origin[i] != ADDED or contents[i].isascii()]
    anchor = next((i for i in ids if pieces.origin[i] == ORDINARY and _ANCHOR.fullmatch(contents[i])), None)
    around, edge = ([], b"") if anchor is None else ([anchor], contents[anchor])
    if around:
        sequence = [*around, *(i for token_id in ids for i in (token_id, *around))]
        if _is_same_text(_decode(backend, sequence), edge + b"".join(contents[i] + edge for i in ids)):
            return None
    for token_id in ids:
        spelled, decoded = edge + contents[token_id] + edge, _decode(backend, [*around, token_id, *around])
        if not (_is_same_text(decoded, spelled) or (not around and _is_same_text(" " + decoded, spelled))):
            place = f" between two {edge.decode()!r}" if around else ""
            return (
                f"its token {backend.id_to_token(token_id)!r} (id {token_id}) stands for {contents[token_id]!r}, "
                f"but it decodes it to {decoded!r}{place}"
            )
    return "its decoder decodes a sequence of tokens differently from its tokens one by one" if around else None


def _wrong_text(pieces: Pieces, backend: Tokenizer) -> str | None:
    """Describe a text that its pieces spell differently. A decoder may strip one dummy space at the front."""
    all_decoded = ""
    for line in _SAMPLE:
        ids = [i for i in backend.encode(line, add_special_tokens=False).ids if not pieces.is_special[i]]
        spelled, decoded = b"".join(map(pieces.bytes_of, ids)), _decode(backend, ids)
        if not (_is_same_text(decoded, spelled) or _is_same_text(" " + decoded, spelled)):
            text = spelled.decode(errors="replace")
            return f"its tokens for {line!r} spell {text!r}, but it decodes them to {decoded!r}"
        all_decoded += decoded
    if all_decoded and not any(map(str.isspace, all_decoded)):
        return f"it drops the white space of a text, so that {_SAMPLE[0][:15]!r} becomes {all_decoded[:15]!r}"
    return None


def _decode(backend: Tokenizer, ids: list[int]) -> str:
    return backend.decode(ids, skip_special_tokens=False)


def _is_same_text(decoded: str, spelled: bytes) -> bool:
    """Compare text with bytes. A run of U+FFFD matches any bytes that are not characters."""
    text = spelled.decode("utf-8", "replace")
    return decoded == text or re.sub("\ufffd+", "\ufffd", decoded) == re.sub("\ufffd+", "\ufffd", text)


def _byte_alphabet() -> dict[str, int]:
    """Map GPT-2's characters to bytes: printable Latin-1 stands for itself, other bytes follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(unprintable)}


_BYTE_OF_CHARACTER = _byte_alphabet()
CHARACTER_OF_BYTE = {byte: character for character, byte in _BYTE_OF_CHARACTER.items()}
_OUTSIDE = "\uffff"
_LATIN_1 = dict.fromkeys(range(256), _OUTSIDE) | {ord(c): chr(byte) for c, byte in _BYTE_OF_CHARACTER.items()}


def byte_level_bytes(token: str) -> bytes:
    """Decode a piece in GPT-2's alphabet. Like the decoder, treat a piece with any other character as plain text."""
    try:
        return token.translate(_LATIN_1).encode("latin-1")
    except UnicodeEncodeError:
        return token.encode()
