"""What losses ask of a GPU at the size of real models: kernels, and gigabytes that they read and write."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world

KERNELS = {
    "cross_entropy": 42,
    "same_vocab, forward_kl": 83,
    "same_vocab, reverse_kl": 88,
    "same_vocab, mixed": 88,
    "same_vocab, jsd": 88,
    "same_vocab, tvd": 88,
    "p_kl": 186,
    "gold": 249,
    "strict": 103,
    "shared_prefix": 126,
    "together": 360,
}
"""Of 2,048 positions, a compiled function being one: budgets, to be lowered with what is saved."""
GIGABYTES = {
    "cross_entropy": 10.1,
    "same_vocab, forward_kl": 14.1,
    "same_vocab, reverse_kl": 16.2,
    "same_vocab, mixed": 16.2,
    "same_vocab, jsd": 16.2,
    "same_vocab, tvd": 16.2,
    "p_kl": 14.6,
    "gold": 21.9,
    "strict": 10.1,
    "shared_prefix": 13.5,
    "together": 26.9,
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
