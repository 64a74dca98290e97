"""What losses ask of a GPU at the size of real models: kernels, and gigabytes that they read and write."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world

KERNELS = {
    "cross_entropy": 46,
    "same_vocab, forward_kl": 57,
    "same_vocab, reverse_kl": 57,
    "same_vocab, mixed": 57,
    "same_vocab, jsd": 57,
    "same_vocab, tvd": 57,
    "p_kl": 152,
    "gold": 553,
    "strict": 202,
    "shared_prefix": 141,
    "together": 371,
}
"""Of 2,048 positions, a compiled function being one: budgets, to be lowered with what is saved."""
GIGABYTES = {
    "cross_entropy": 13.3,
    "same_vocab, forward_kl": 17.3,
    "same_vocab, reverse_kl": 17.3,
    "same_vocab, mixed": 17.3,
    "same_vocab, jsd": 17.3,
    "same_vocab, tvd": 17.3,
    "p_kl": 27.9,
    "gold": 56.5,
    "strict": 28.7,
    "shared_prefix": 26.2,
    "together": 46.3,
}
"""Of the same, the products with the heads included."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    by_loss: dict[str, Any] = json.loads(processes.program("tests.losses.traffic"))
    return by_loss


@pytest.mark.parametrize("name", KERNELS)
def test_a_loss_keeps_to_its_budgets(found: dict[str, Any], name: str) -> None:
    assert 0.5 * KERNELS[name] < found[name]["kernels"] <= KERNELS[name]
    assert 0.5 * GIGABYTES[name] < found[name]["bytes"] / 1e9 <= GIGABYTES[name]


@pytest.mark.parametrize("name", KERNELS)
def test_the_host_waits_for_nothing(found: dict[str, Any], name: str) -> None:
    assert not found[name]["waits"]
    assert sum(found[name]["copies"].values()) <= 5
