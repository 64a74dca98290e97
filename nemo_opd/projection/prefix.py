"""Longest known prefixes of byte strings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray


def longest_prefixes(contents: Sequence[bytes], known: Mapping[bytes, int]) -> NDArray[np.int32]:
    """For each content the value of its longest prefix that is a key of `known`; −1 where none is."""
    longest = max(map(len, known), default=0)
    found = np.full(len(contents), -1, np.int32)
    for place, content in enumerate(contents):
        for length in range(min(len(content), longest), 0, -1):
            value = known.get(content[:length])
            if value is not None:
                found[place] = value
                break
    return found
