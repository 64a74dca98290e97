"""Cache of objects derived from a projection's arrays, kept while the arrays live."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Object = TypeVar("_Object")

_cache: dict[tuple[Hashable, ...], Any] = {}


def cached_by_array(make: Callable[[], _Object], arrays: Sequence[NDArray[np.generic]], *key: Hashable) -> _Object:
    """Call `make` once per arrays and key; `key` identifies the object and its other inputs."""
    full_key = (*key, *map(id, arrays))
    if full_key not in _cache:
        _cache[full_key] = make()
        for array in arrays:  # An id may be reused once its array is gone.
            weakref.finalize(array, _cache.pop, full_key, None)
    return _cache[full_key]
