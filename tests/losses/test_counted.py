"""Losses on a pretended GPU: they do not wait for it, and copy to it only with their plan.

Cases make the masks of `same_vocab`, `tcad` and `sampled_kl` on the device, so their units are counted there; a
training step does that on the host (tests/workers/test_counted.py). `tcad` sums its weights on the device if there is
no normalizer. The gradient of a logit tensor, `logits/rows.py`, waits once; a gradient of hidden states does not.
"""

import json
from typing import Any

import pytest

from tests import processes
from tests.losses.cases import ALL_LOSSES, Case

pytestmark = pytest.mark.world

OF_THE_CASES = ("logits/rows.py", "losses/arguments.py", "losses/tcad.py")
"""Files that cases wait in, once each at most."""
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
"""Kernels of forward and backward if all units are one block, as budgets to be lowered; a compiled function is one."""


@pytest.fixture(scope="module")
def measured() -> dict[str, Any]:
    by_loss: dict[str, Any] = json.loads(processes.program("tests.losses.counted"))
    return by_loss


@pytest.mark.parametrize("case", ALL_LOSSES, ids=lambda case: case.name)
def test_no_loss_waits_for_the_device_or_copies_to_it(measured: dict[str, Any], case: Case) -> None:
    """Bugs: a count of rows that is read back, a constant that is sent for each block, an index on the host."""
    work = measured[case.name]
    assert all(place.rpartition(", ")[2].startswith(OF_THE_CASES) for place in work["waits"]), work["waits"]
    assert all(number == 1 for number in work["waits"].values()), work["waits"]
    assert all(place.startswith(PLANS) for place in work["copies"]), work["copies"]
    assert sum(work["copies"].values()) <= 9


@pytest.mark.parametrize("case", ALL_LOSSES, ids=lambda case: case.name)
def test_a_loss_has_no_more_kernels_than_its_budget(measured: dict[str, Any], case: Case) -> None:
    """Bug: a kernel for each unit, or another pass over the logits."""
    assert 0.5 * KERNELS[case.name] < measured[case.name]["kernels"] <= KERNELS[case.name]


@pytest.mark.parametrize("case", ALL_LOSSES, ids=lambda case: case.name)
def test_a_loss_equals_the_cpu(measured: dict[str, Any], case: Case) -> None:
    """Bug: a wrong value on GPUs only; some losses read fewer rows on a CPU."""
    assert measured[case.name]["error"] < 1e-5
