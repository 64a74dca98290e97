"""Compilation of loops with Numba."""

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function without the interpreter, and cache its machine code in a folder that Numba can write to.

    Numba may find none: for example in a container whose user has no home and does not own the package.
    """
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:
        return numba.njit(function, nogil=True)
