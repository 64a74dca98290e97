"""What losses ask of a GPU at the size of real models: kernels, and gigabytes that they read and write."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world

KERNELS = {
    "cross_entropy": 45,
    "same_vocab, forward_kl": 86,
    "same_vocab, reverse_kl": 91,
    "same_vocab, mixed": 91,
    "same_vocab, jsd": 91,
    "same_vocab, tvd": 91,
    "p_kl": 189,
    "gold": 252,
    "strict": 106,
    "shared_prefix": 129,
    "together": 363,
}
"""Of 2,048 positions, a compiled function being one: budgets, to be lowered with what is saved."""
GIGABYTES = {
    "cross_entropy": 11.2,
    "same_vocab, forward_kl": 15.2,
    "same_vocab, reverse_kl": 17.3,
    "same_vocab, mixed": 17.3,
    "same_vocab, jsd": 17.3,
    "same_vocab, tvd": 17.3,
    "p_kl": 15.7,
    "gold": 23.0,
    "strict": 11.2,
    "shared_prefix": 14.6,
    "together": 28.0,
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
