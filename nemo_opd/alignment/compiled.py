"""Compilation of loops."""

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Any:
    """Compile a function that needs no interpreter, and keep its machine code where Numba finds a folder to write to.

    There may be none: in a container, say, whose user has no home and does not own the package.
    """
    try:
        return numba.njit(function, cache=True, nogil=True)
    except RuntimeError:
        return numba.njit(function, nogil=True)
