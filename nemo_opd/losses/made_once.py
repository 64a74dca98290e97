"""What losses derive from the arrays of a projection, kept as long as the arrays live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Made = TypeVar("Made")

_made: dict[tuple[Hashable, ...], Any] = {}


def made_once(make: Callable[[], Made], arrays: Sequence[NDArray[np.generic]], *key: Hashable) -> Made:
    """What `make` returns, the same object for the same arrays and key; `key` names what is made and all it reads."""
    full_key = (*key, *map(id, arrays))
    if full_key not in _made:
        _made[full_key] = make()
        for array in arrays:  # An id is used again once its array is gone.
            weakref.finalize(array, _made.pop, full_key, None)
    return _made[full_key]
