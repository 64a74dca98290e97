"""Objects that losses derive from the arrays of a projection, kept as long as the arrays live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Made = TypeVar("_Made")

_made: dict[tuple[Hashable, ...], Any] = {}


def made_once(make: Callable[[], _Made], arrays: Sequence[NDArray[np.generic]], *key: Hashable) -> _Made:
    """Return the result of `make`, one object for the same arrays and key; `key` names the object and its inputs."""
    full_key = (*key, *map(id, arrays))
    if full_key not in _made:
        _made[full_key] = make()
        for array in arrays:  # An id is used again once its array is gone.
            weakref.finalize(array, _made.pop, full_key, None)
    return _made[full_key]
