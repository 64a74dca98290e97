"""What losses ask of a GPU, counted on one that is none: none waits for it or copies to it but its plan.

Cases make the masks of `same_vocab`, `tcad` and `sampled_kl` on the device, so that their units are counted there; a
training step does that on the host (tests/workers/test_counted.py). `tcad` adds up its weights where no normalizer is
given. The gradient of a tensor of logits, `logits/rows.py`, has one wait; one of hidden states has none.
"""

import json
import subprocess
import sys
from typing import Any

import pytest

from tests.losses.cases import ALL_LOSSES, Case

pytestmark = pytest.mark.world

OF_THE_CASES = ("logits/rows.py", "losses/reduction.py", "losses/tcad.py")
"""Where cases wait, once each at most."""
PLANS = "distributed/transfer.py"
KERNELS = {
    "same_vocab": 62,
    "same_vocab-teacher_topk": 67,
    "same_vocab-student_topk": 90,
    "same_vocab-union": 99,
    "tcad": 133,
    "tcad-renormalised": 101,
    "tcad-union": 90,
    "tcad-all": 75,
    "sampled_kl-k2": 126,
    "sampled_kl-k3": 131,
    "sampled_chunk_kl-k2": 116,
    "sampled_chunk_kl-k3": 121,
    "p_kl": 105,
    "p_kl-vocab_topk": 141,
    "p_kl-mean": 127,
    "gold": 94,
    "gold-tails": 94,
    "gold-mean": 100,
    "h_kl": 94,
    "h_kl-mean": 100,
    "strict": 56,
    "strict-rest": 79,
    "strict-topk": 60,
    "strict-topk-rest": 83,
    "byte_prefix": 200,
    "shared_prefix": 88,
    "alm": 144,
    "uld": 46,
    "p_kl-continuation": 242,
    "gold-continuation": 231,
    "h_kl-continuation": 231,
    "strict-continuation": 193,
    "byte_prefix-continuation": 337,
    "shared_prefix-continuation": 225,
}
"""Kernels of forward and backward where all units are one block: budgets, to be lowered with what is saved."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.losses.counted"], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    by_loss: dict[str, Any] = json.loads(done.stdout)
    return by_loss


@pytest.mark.parametrize("case", ALL_LOSSES, ids=lambda case: case.name)
def test_no_loss_waits_for_the_device_or_copies_to_it(found: dict[str, Any], case: Case) -> None:
    """Bugs: a number of rows that is read back, a constant that is sent anew for each block, an index on the host."""
    of = found[case.name]
    assert all(place.rpartition(", ")[2].startswith(OF_THE_CASES) for place in of["waits"]), of["waits"]
    assert all(number == 1 for number in of["waits"].values()), of["waits"]
    assert all(place.startswith(PLANS) for place in of["copies"]), of["copies"]
    assert sum(of["copies"].values()) <= 9


@pytest.mark.parametrize("case", ALL_LOSSES, ids=lambda case: case.name)
def test_a_loss_has_no_more_kernels_than_its_budget(found: dict[str, Any], case: Case) -> None:
    assert 0.5 * KERNELS[case.name] < found[case.name]["kernels"] <= KERNELS[case.name]


@pytest.mark.parametrize("case", ALL_LOSSES, ids=lambda case: case.name)
def test_a_loss_is_that_of_the_cpu(found: dict[str, Any], case: Case) -> None:
    """Some look at fewer rows on a CPU."""
    assert found[case.name]["error"] < 1e-5
