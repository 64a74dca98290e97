"""What a training step asks of a real GPU, against the budgets that hold on a pretended one."""

import pytest

from tests.workers.profiled import main
from tests.workers.test_counted import COPIES, KERNELS

pytestmark = pytest.mark.world

OF_THE_DEVICE = 1.5
"""Kernels of a real GPU for one operation that is counted: a sum may take two, FSDP copies what it gathers."""


def test_the_program_sees_a_step() -> None:
    """On a CPU, where it counts operations. Bug: a program that is run for the first time where a GPU is at hand."""
    found = main("cpu", [])
    assert found["microbatches"] > 1
    assert found["kernels"] > 100
    assert found["waits"] == found["copies"] == {}


@pytest.mark.gpu
def test_a_step_stays_within_the_budgets() -> None:
    """Bugs: kernels or waits that the pretended GPU does not see, such as those of collectives and optimizers."""
    found = main("cuda", [])
    microbatches = found["microbatches"]
    assert found["kernels"] <= OF_THE_DEVICE * KERNELS["p_kl"] * microbatches, found
    assert sum(found["waits"].values()) <= 2 * microbatches, found
    pageable = sum(number for name, number in found["copies"].items() if "Pageable" in name and "HtoD" in name)
    assert pageable == 0, found
    assert sum(number for name, number in found["copies"].items() if "HtoD" in name) <= COPIES * microbatches, found
