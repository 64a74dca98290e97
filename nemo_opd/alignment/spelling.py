"""The bytes of a sequence of tokens, as the compiled code of the alignment reads and writes them."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

TEXT = -1
"""Class of a token that stands for bytes. Tokens of other classes stand outside the text and are barriers."""


class PieceTable(NamedTuple):
    """Classes and bytes of a tokenizer's ids."""

    classes: NDArray[np.int32]
    """[V]: TEXT, or a row or column of the matrix of matching special tokens."""
    offsets: NDArray[np.int64]
    """[V + 1]: an id's bytes are buffer[offsets[id] : offsets[id + 1]]."""
    buffer: NDArray[np.uint8]


class Spelling(NamedTuple):
    """A sequence's text and its tokens' edges in it."""

    data: NDArray[np.uint8]
    edges: NDArray[np.int64]
    """[S + 1]: token i stands for data[edges[i] : edges[i + 1]], empty for a barrier."""
    classes: NDArray[np.int32]
    """[S]"""
