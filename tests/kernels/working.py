"""That kernels are really used: what falls back to PyTorch computes the same."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from nemo_opd.kernels import launch


@contextmanager
def kernels_working() -> Iterator[None]:
    """Fail if a kernel or a compiled function is given up inside, or has been given up before."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*could not be (used|compiled)")
        yield
    assert not launch._has_failed, "a kernel failed before; PyTorch's were used"
