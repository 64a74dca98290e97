"""Student tokens that the teacher spells with several tokens (METHODS §2, step 2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from nemo_opd.alignment.backend import read_backend, rust_tokenizer
from nemo_opd.alignment.pieces import Pieces
from nemo_opd.projection.byte_bpe import ByteBPE

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Progress = Callable[[int, int], None]
"""(pieces done, pieces in all)"""

DECAY = 0.1
"""Weight of a piece relative to the one before: 0.9, 0.09, 0.009, …"""
_BATCH = 4096


@dataclass(frozen=True, slots=True)
class Row:
    """Teacher ids and their weights, the heaviest first."""

    ids: tuple[int, ...]
    weights: tuple[float, ...]


def spell_with(
    tokenizer: PreTrainedTokenizerBase, pieces: Pieces, contents: Sequence[bytes], progress: Progress | None = None
) -> list[list[int] | None]:
    """Ids of `tokenizer` whose bytes are exactly the content's, for each content; None where it has none.

    Text goes through the whole tokenizer, so its digit and word rules hold. What does not come back byte for byte (half
    characters, what the normaliser changes, the names of special tokens) goes through its merges alone.
    """
    if not contents:
        return []
    backend = Tokenizer.from_str(rust_tokenizer(tokenizer).to_str())
    backend.no_truncation()
    backend.no_padding()
    by_merges = ByteBPE(read_backend(tokenizer))
    spelled: list[list[int] | None] = []
    for start in range(0, len(contents), _BATCH):
        batch = contents[start : start + _BATCH]
        texts = [content.decode("utf-8", "replace") for content in batch]
        encodings = backend.encode_batch_fast(texts, add_special_tokens=False)
        for content, encoding in zip(batch, encodings, strict=True):
            ids: list[int] | None = encoding.ids
            if not _spells(pieces, ids, content):
                ids = by_merges.encode(content)
            spelled.append(ids if _spells(pieces, ids, content) else None)
        if progress is not None:
            progress(len(spelled), len(contents))
    return spelled


def _spells(pieces: Pieces, ids: list[int] | None, content: bytes) -> bool:
    return bool(ids) and b"".join(map(pieces.bytes_of, ids or ())) == content


def decayed_row(ids: Sequence[int], top_k: int) -> Row:
    """Weights ∝ 0.9·0.1^i for the i-th id, added up where an id repeats, cut to the `top_k` heaviest, of sum 1."""
    mass: dict[int, float] = {}
    for place, token_id in enumerate(ids):
        mass[token_id] = mass.get(token_id, 0.0) + (1 - DECAY) * DECAY**place
    kept = sorted(mass.items(), key=lambda item: (-item[1], item[0]))[:top_k]
    total = sum(weight for _, weight in kept)
    return Row(tuple(i for i, _ in kept), tuple(weight / total for _, weight in kept))
