"""What losses ask of a GPU at the size of real models: kernels, and gigabytes that they read and write."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world

BUDGETS = {
    "cross_entropy": (27, 8.6),
    "same_vocab, forward_kl": (28, 12.5),
    "same_vocab, reverse_kl": (29, 14.6),
    "same_vocab, mixed": (29, 14.6),
    "same_vocab, jsd": (29, 14.6),
    "same_vocab, tvd": (29, 14.6),
    "p_kl": (38, 13.0),
    "gold": (260, 20.4),
    "h_kl": (260, 20.2),
    "strict": (31, 8.5),
    "byte_prefix": (641, 14.8),
    "shared_prefix": (32, 11.9),
    "alm": (375, 25.2),
    "uld": (207, 47.7),
    "sampled_chunk_kl": (426, 20.6),
    "tcad": (308, 23.0),
    "sampled_kl": (426, 19.9),
    "together": (118, 22.9),
    "at a time": (269, 75.8),
}
"""Kernels, a compiled function being one, and GB, those of products included: to be lowered with what is saved.

Of 2,048 positions; `together` of cross-entropy, `same_vocab` and `p_kl`, `at a time` of these at 8,192.
"""
POSITIONS = {"starts": (784, 27.2), "drop": (2037, 66.1), "rest": (2037, 66.1), "cover": (3198, 73.5)}
"""Of `byte_prefix` with a teacher of 262,144 tokens, half of which the student writes in two: at 2,048 positions, or at
the starts of their 1,365 chunks.
"""
SHARE_OF_PRODUCT = 0.01
"""Operations besides products, one for each fp32 number read or written, as a share of the product with the teacher's
head. Their bytes are not as few: 28 GB (36 with cover), 4 GB at starts, next to 23 to 38 GB of all products.
"""
ELEMENTWISE = 9.2
"""GB that the three together may read and write for 2,048 tokens besides what their products do."""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    by_loss: dict[str, Any] = json.loads(processes.program("tests.losses.traffic"))
    return by_loss


@pytest.mark.parametrize("name", BUDGETS)
def test_a_loss_keeps_to_its_budgets(found: dict[str, Any], name: str) -> None:
    """Bugs: another pass over rows of logits, a copy of them, a kernel for each unit."""
    kernels, gigabytes = BUDGETS[name]
    assert 0.5 * kernels < found[name]["kernels"] <= kernels
    assert 0.5 * gigabytes < found[name]["bytes"] / 1e9 <= gigabytes


def test_few_bytes_are_moved_besides_products(found: dict[str, Any]) -> None:
    """In the microbatches of the recipes, each of which rounds the gradient of the head's weight once."""
    of = found["at a time"]
    gigabytes = of["elementwise"] / of["positions"] * 2048 / 1e9
    assert 0.5 * ELEMENTWISE < gigabytes <= ELEMENTWISE


@pytest.mark.parametrize("ends", POSITIONS)
def test_targets_at_all_positions_keep_to_their_budgets(found: dict[str, Any], ends: str) -> None:
    """Bugs: a comparison that is not one compiled function, a table of masks or logits more, a wait for the device."""
    kernels, gigabytes = POSITIONS[ends]
    of = found["positions"][ends]
    assert 0.5 * kernels < of["kernels"] <= kernels
    assert 0.5 * gigabytes < of["bytes"] / 1e9 <= gigabytes
    assert of["elementwise"] / 4 <= SHARE_OF_PRODUCT * of["product"]
    assert not of["waits"]


@pytest.mark.parametrize("name", BUDGETS)
def test_the_host_waits_for_nothing(found: dict[str, Any], name: str) -> None:
    assert not found[name]["waits"]
    assert sum(found[name]["copies"].values()) <= 5
