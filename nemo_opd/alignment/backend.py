"""What a fast tokenizer's serialised backend says about how its tokens spell text."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from nemo_opd.errors import AlignmentError

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

Kind = Literal["byte_level", "sentencepiece"]
META_SPACE = "▁"


@dataclass(frozen=True, slots=True)
class AddedToken:
    id: int
    stored: str
    """Its content as the normaliser left it, which is what is matched in a text and decoded."""
    special: bool


@dataclass(frozen=True, slots=True)
class Backend:
    """The parts of a tokenizer's backend that decide which bytes a token stands for."""

    kind: Kind
    """byte_level: the GPT-2 alphabet, one character a byte. sentencepiece: UTF-8 with `▁` for a space."""
    byte_fallback: bool
    """`<0xHH>` stands for one byte."""
    vocab: dict[str, int]
    """The model's own pieces; added tokens may be among them."""
    merges: tuple[tuple[str, str], ...]
    """BPE merges, the first is applied first; empty for a unigram model."""
    unk_token: str | None
    added: tuple[AddedToken, ...]
    fingerprint: str


def rust_tokenizer(tokenizer: PreTrainedTokenizerBase) -> Tokenizer:
    """The backend of a fast tokenizer. Raises AlignmentError where there is none."""
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
    """SHA-256 of what determines the tokenizer's behaviour. Truncation and padding are state of a call and left out.

    Raises AlignmentError for a tokenizer without a fast backend.
    """
    return _digest(rust_tokenizer(tokenizer).to_str())


def read_backend(tokenizer: PreTrainedTokenizerBase) -> Backend:
    """Raises AlignmentError where a token's bytes cannot be told from its text."""
    backend = rust_tokenizer(tokenizer)
    text = backend.to_str()
    data = json.loads(text)
    model = data["model"]
    decoders = _decoders(data["decoder"])
    try:
        kind = _kind(model, decoders)
    except AlignmentError as error:
        raise AlignmentError(f"tokenizer {name_of(tokenizer)} cannot be aligned by bytes: {error}") from None
    vocab = model["vocab"] if isinstance(model["vocab"], dict) else {p: i for i, (p, _) in enumerate(model["vocab"])}
    return Backend(
        kind=kind,
        byte_fallback=kind == "sentencepiece" and any(d["type"] == "ByteFallback" for d in decoders),
        vocab=vocab,
        merges=tuple((left, right) for left, right in model.get("merges", ())),
        unk_token=_unk_token(model),
        added=tuple(
            AddedToken(t["id"], backend.id_to_token(t["id"]) or t["content"], t["special"])
            for t in data["added_tokens"]
        ),
        fingerprint=_digest(text),
    )


def _digest(serialized: str) -> str:
    """Of all but version, truncation and padding, which come first; parsing all would cost a second."""
    _, key, behaviour = serialized.partition('"added_tokens":')
    assert key, "a serialised tokenizer lists its added tokens"
    return hashlib.sha256(behaviour.encode()).hexdigest()


def _decoders(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The decoder as a flat list of steps."""
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _decoders(inner)]
    return [decoder]


def _kind(model: dict[str, Any], decoders: list[dict[str, Any]]) -> Kind:
    if model["type"] not in ("BPE", "Unigram"):
        raise AlignmentError(f"a {model['type']} model drops white space and marks that its tokens cannot give back")
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise AlignmentError(f"its model writes {key}={model[key]!r} into tokens that stand for other text")
    if any(step["type"] == "ByteLevel" for step in decoders):
        return "byte_level"
    if any(step["type"] == "Metaspace" or _writes_spaces(step) for step in decoders):
        return "sentencepiece"
    types = ", ".join(step["type"] for step in decoders) or "none"
    raise AlignmentError(f"its decoder ({types}) is neither ByteLevel nor one that turns {META_SPACE!r} into a space")


def _writes_spaces(step: dict[str, Any]) -> bool:
    return step["type"] == "Replace" and step["pattern"] == {"String": META_SPACE} and step["content"] == " "


def _unk_token(model: dict[str, Any]) -> str | None:
    if model["type"] == "Unigram":
        return None if model["unk_id"] is None else model["vocab"][model["unk_id"]][0]
    return model["unk_token"]
