"""What losses ask of a GPU, counted on one that is none: none waits for it or copies to it but its plan.

Cases make the masks of `same_vocab`, `tcad` and `sampled_kl` on the device, so that their units are counted there; a
training step does that on the host (tests/workers/test_counted.py). `tcad` adds up its weights where no normalizer is
given. The gradient of a tensor of logits, `logits/rows.py`, has one wait; one of hidden states has none.
"""

import json
from typing import Any

import pytest

from tests import processes
from tests.losses.cases import ALL_LOSSES, Case

pytestmark = pytest.mark.world

OF_THE_CASES = ("logits/rows.py", "losses/arguments.py", "losses/tcad.py")
"""Where cases wait, once each at most."""
PLANS = "distributed/transfer.py"
KERNELS = {
    "same_vocab": 34,
    "same_vocab-teacher_topk": 45,
    "same_vocab-student_topk": 56,
    "same_vocab-union": 65,
    "tcad": 99,
    "tcad-renormalised": 79,
    "tcad-union": 68,
    "tcad-all": 53,
    "sampled_kl-k2": 114,
    "sampled_kl-k3": 119,
    "sampled_chunk_kl-k2": 104,
    "sampled_chunk_kl-k3": 109,
    "p_kl": 30,
    "p_kl-vocab_topk": 70,
    "p_kl-mean": 68,
    "gold": 50,
    "gold-tails": 50,
    "gold-mean": 81,
    "h_kl": 50,
    "h_kl-mean": 81,
    "strict": 24,
    "strict-rest": 24,
    "strict-topk": 38,
    "strict-topk-rest": 49,
    "byte_prefix": 99,
    "byte_prefix-spelling": 99,
    "byte_prefix-drop": 222,
    "byte_prefix-cover": 312,
    "byte_prefix-rest": 222,
    "shared_prefix": 27,
    "escd": 113,
    "alm": 132,
    "uld": 46,
    "p_kl-continuation": 153,
    "gold-continuation": 174,
    "h_kl-continuation": 174,
    "strict-continuation": 147,
    "byte_prefix-continuation": 223,
    "shared_prefix-continuation": 150,
}
"""Kernels of forward and backward where all units are one block, budgets to be lowered; a compiled function is one."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    by_loss: dict[str, Any] = json.loads(processes.program("tests.losses.counted"))
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
