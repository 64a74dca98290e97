"""The work of a training step on a real GPU, against the budgets for the pretended GPU."""

import pytest

from tests.workers.profiled import main
from tests.workers.test_counted import COPIES, KERNELS

pytestmark = pytest.mark.world

KERNELS_PER_OPERATION = 1.5
"""Kernels of a real GPU per counted operation: a sum may take two, and FSDP copies gathered shards."""


def test_the_program_sees_a_step() -> None:
    """Bug: the program fails, which only a machine with a GPU would show. On a CPU it counts operations."""
    counts = main("cpu", [])
    assert counts["microbatches"] > 1
    assert counts["kernels"] > 100
    assert counts["waits"] == counts["copies"] == {}


@pytest.mark.gpu
def test_a_step_stays_within_the_budgets() -> None:
    """Bugs: kernels or waits that the pretended GPU does not see, as in collectives and optimizers."""
    counts = main("cuda", [])
    microbatches = counts["microbatches"]
    assert counts["kernels"] <= KERNELS_PER_OPERATION * KERNELS["p_kl"] * microbatches, counts
    assert sum(counts["waits"].values()) <= 2 * microbatches, counts
    pageable = sum(number for name, number in counts["copies"].items() if "Pageable" in name and "HtoD" in name)
    assert pageable == 0, counts
    assert sum(number for name, number in counts["copies"].items() if "HtoD" in name) <= COPIES * microbatches, counts
