"""R of methods.md (2.1), built token by token in plain Python for byte-level tokenizers."""

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from nemo_opd.alignment.pieces import pieces_of
from nemo_opd.alignment.roles import pair_special_tokens

_BYTE_OF = {character: byte for byte, character in bytes_to_unicode().items()}


def contents(tokenizer: PreTrainedTokenizerFast) -> dict[int, bytes]:
    """Return the bytes of all ids except special tokens."""
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    return {
        i: bytes(_BYTE_OF[character] for character in token)
        for token, i in tokenizer.get_vocab().items()
        if i not in special
    }


def spelled(tokenizer: PreTrainedTokenizerFast, text: bytes) -> list[int]:
    backend, token_bytes = tokenizer.backend_tokenizer, contents(tokenizer)
    ids = backend.encode(text.decode("utf-8", "replace"), add_special_tokens=False).ids
    if b"".join(token_bytes.get(i, b"") for i in ids) == text:
        return ids
    return [token.id for token in backend.model.tokenize("".join(bytes_to_unicode()[byte] for byte in text))]


def dense_map(new: PreTrainedTokenizerFast, old: PreTrainedTokenizerFast, weighting: str) -> NDArray[np.float64]:
    """Return R [V, W], float64; a row without a counterpart is 0."""
    by_role = pair_special_tokens(new, old, pieces_of(new), pieces_of(old)).best
    old_contents, new_contents = contents(old), contents(new)
    by_bytes = {text: i for i, text in old_contents.items()}
    dense = np.zeros((1 + max(new.get_vocab().values()), 1 + max(old.get_vocab().values())))
    for i, partner in by_role.items():
        dense[i, partner] = 1
    for i, text in new_contents.items():
        if text in by_bytes:
            dense[i, by_bytes[text]] = 1
            continue
        ids = spelled(old, text)
        for place, piece in enumerate(ids):
            dense[i, piece] += {
                "uniform": 1.0,
                "bytes": len(old_contents[piece]),
                "first": 0.1**place,
                "last": 0.1 ** (len(ids) - 1 - place),
            }[weighting]
        dense[i] /= dense[i].sum()
    return dense
