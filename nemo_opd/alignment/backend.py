"""A fast tokenizer's serialised backend, read for how its tokens spell text."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Kind = Literal["byte_level", "sentencepiece"]
META_SPACE = "▁"
_MERGES = '"merges":['
"""Start of the list of merges, and of nothing else: quotation marks inside a JSON string are escaped."""
_END_OF_MODEL = "]}}"


@dataclass(frozen=True, slots=True)
class AddedToken:
    id: int
    stored: str
    """The content as the normaliser left it, which is matched in texts and decoded. White space that the token swallows
    around itself (lstrip, rstrip) is excluded.
    """
    special: bool
    in_byte_alphabet: bool
    """Whether the normaliser wrote the content in the GPT-2 alphabet."""


@dataclass(frozen=True)
class Backend:
    """The parts of a tokenizer's backend that determine which bytes a token stands for."""

    kind: Kind
    """byte_level: the GPT-2 alphabet, one character per byte. sentencepiece: UTF-8 with `▁` for a space."""
    byte_fallback: bool
    """`<0xHH>` stands for one byte."""
    vocab: dict[str, int]
    """The model's own pieces, which may include added tokens."""
    merges_json: str
    """List of pairs. Parsed on demand, since it takes most of the parsing time."""
    unk_token: str | None
    added: tuple[AddedToken, ...]
    fingerprint: str

    @cached_property
    def merges(self) -> tuple[tuple[str, str], ...]:
        """BPE merges in the order of application; empty for a unigram model."""
        return tuple((left, right) for left, right in json.loads(self.merges_json))


@dataclass(frozen=True, slots=True)
class _Serialized:
    """A backend as JSON. Serialising takes tenths of a second for large vocabularies, so do it once."""

    text: str
    fingerprint: str


def rust_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """Return the backend of a fast tokenizer. Raises AlignmentError for a slow tokenizer."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise AlignmentError(
            f"tokenizer {name_of(tokenizer)} ({type(tokenizer).__name__}) has no fast backend, so the bytes of its "
            "tokens are unknown; use a version of it that ships tokenizer.json"
        )
    return backend


def name_of(tokenizer: PreTrainedTokenizerBase) -> str:
    return str(getattr(tokenizer, "name_or_path", "")) or type(tokenizer).__name__


def fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the SHA-256 of a tokenizer's behaviour, except truncation and padding, which calls set.

    Raises AlignmentError for a tokenizer without a fast backend.
    """
    return serialize(tokenizer).fingerprint


def serialize(tokenizer: PreTrainedTokenizerBase) -> _Serialized:
    """Serialise the backend. Raises AlignmentError for a tokenizer without a fast one."""
    text = rust_tokenizer(tokenizer).to_str()
    # The version, truncation and padding precede this key.
    _, key, behaviour = text.partition('"added_tokens":')
    assert key, "a serialised tokenizer lists its added tokens"
    return _Serialized(text, hashlib.sha256(behaviour.encode()).hexdigest())


def read_backend(tokenizer: PreTrainedTokenizerBase, serialized: _Serialized | None = None) -> Backend:
    """Read a tokenizer's backend. Pass `serialized` to avoid serialising again.

    Raises AlignmentError if a token's bytes cannot be told from its text.
    """
    backend = rust_tokenizer(tokenizer)
    serialized = serialized or serialize(tokenizer)
    data, merges_json = _parse(serialized.text)
    model, decoders = data["model"], list(_steps(data["decoder"], "decoders"))
    try:
        kind = _kind(model, decoders)
    except AlignmentError as error:
        raise AlignmentError(f"tokenizer {name_of(tokenizer)} cannot be aligned by bytes: {error}") from None
    writes_alphabet = any(step["type"] == "ByteLevel" for step in _steps(data["normalizer"], "normalizers"))
    return Backend(
        kind=kind,
        byte_fallback=kind == "sentencepiece" and any(d["type"] == "ByteFallback" for d in decoders),
        vocab=model["vocab"] if isinstance(model["vocab"], dict) else {p: i for i, (p, _) in enumerate(model["vocab"])},
        merges_json=merges_json,
        unk_token=_unk_token(model),
        added=tuple(
            AddedToken(
                t["id"],
                backend.id_to_token(t["id"]) or t["content"],
                t["special"],
                kind == "byte_level" and writes_alphabet and t["normalized"],
            )
            for t in data["added_tokens"]
        ),
        fingerprint=serialized.fingerprint,
    )


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


def _kind(model: dict[str, Any], decoders: list[dict[str, Any]]) -> Kind:
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
