"""A check that kernels are used: a fallback to PyTorch gives the same results."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_opd.kernels import launch


@contextmanager
def kernels_working() -> Iterator[None]:
    """Fail if a kernel or a compiled function falls back to PyTorch inside, or has done so before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be (used|compiled)")
        yield
    assert not launch._has_failed, "a kernel failed before; PyTorch's were used"
