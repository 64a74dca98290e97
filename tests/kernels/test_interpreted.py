"""Kernels against the PyTorch form of the losses, in Triton's interpreter: a process of its own, which sets it up."""

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.losses import oracle

pytest.importorskip("triton")
pytestmark = pytest.mark.world

KINDS = [kind for kind, _ in oracle.KINDS]
NAMES = [
    *(f"together-{kind}" for kind in KINDS),
    "extreme",
    *(f"infinite-{kind}" for kind in ("forward_kl", "reverse_kl", "jsd")),
    "mixture",
    "two-forms",
]
LARGEST_ERROR = {"extreme": 2**-17}
"""As a share of the largest number: fp32 rounds logits of up to 150 by that much."""
FP32 = 2**-20
"""The same of others."""
SCALARS = 4 * 24
"""Bytes of single numbers that a program reads or writes of a row, at most."""
ROWS = 6


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.interpreted"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    by_case: dict[str, Any] = json.loads(done.stdout)
    return by_case


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_and_its_gradient_are_those_of_pytorch(found: dict[str, Any], name: str) -> None:
    """Bugs: a row or column of another unit, a sum in the wrong order of scales, NaN of what is empty."""
    of = found[name]
    assert of["is_finite"]
    assert of["kernels"]["gradient of rows"] == (2 if name in ("mixture", "two-forms") else 1)
    assert of["error"] < LARGEST_ERROR.get(name, FP32)


def test_a_gradient_that_is_put_once_is_rounded_once(found: dict[str, Any]) -> None:
    """It is rounded to bf16, and so are the gradients that products with it make: 2^−8 each, of the largest number."""
    assert 0 < found["head-bf16"]["error"] < 2 * 2**-8


@pytest.mark.parametrize("name", ["same_vocab", "strict-rest", "shared_prefix"])
def test_equal_sides_pull_at_nothing(found: dict[str, Any], name: str) -> None:
    """Rounding noise would pull at a student that is already right."""
    assert found[f"equal-{name}"]["kernels"]
    assert found[f"equal-{name}"]["error"] == 0


def test_kernels_say_how_much_they_read_and_write(found: dict[str, Any]) -> None:
    """Counted in the interpreter: vectors of rows as often as they are read, maps once, and some numbers a row."""
    for name, said, moved, maps in found["bytes"]["kernels"]:
        assert moved <= said <= moved + maps + ROWS * SCALARS, name
