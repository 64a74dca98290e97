"""Contents re-tokenized so that not a byte changes (methods.md §2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from nemo_opd.alignment.backend import rust_tokenizer
from nemo_opd.projection.pair import Side
from nemo_opd.projection.raw_model import RawModel

Progress = Callable[[int, int], None]
"""(tokens done, tokens in all)"""
_BATCH = 4096


@dataclass(frozen=True, slots=True, eq=False)
class Spellings:
    """For each content the ids that spell it, one content after the other."""

    ids: NDArray[np.int64]
    content: NDArray[np.int64]
    """The content an id belongs to."""
    place: NDArray[np.int64]
    """Which of its content's pieces an id is, from 0."""


def spell_with(side: Side, contents: Sequence[bytes], progress: Progress | None = None) -> Spellings:
    """The ids of `side` whose bytes are exactly the content's, for each content; none where it has none.

    Text goes through the whole tokenizer, so its digit and word rules hold. What does not come back byte for byte (half
    characters, what the normaliser changes, the names of special tokens) goes through its model alone.
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
    return Spellings(
        ids,
        np.repeat(np.arange(len(spelled)), lengths),
        np.arange(len(ids)) - np.repeat(ends - lengths, lengths),
    )


def _spelling(pieces: list[bytes], ids: list[int], content: bytes) -> list[int]:
    """The ids if they spell the content, else none."""
    return ids if b"".join([pieces[token_id] for token_id in ids]) == content else []


def _without_truncation(backend: Tokenizer) -> Tokenizer:
    """The backend itself where it cuts and pads nothing: a copy of it costs a second."""
    if backend.truncation is None and backend.padding is None:
        return backend
    copy = Tokenizer.from_str(backend.to_str())
    copy.no_truncation()
    copy.no_padding()
    return copy
