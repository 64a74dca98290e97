"""Losses in the sizes of real models: kernels, and gigabytes read and written."""

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
"""Kernels (a compiled function is one) and GB including products, as budgets to be lowered.

For 2,048 positions. `together` is cross-entropy, `same_vocab` and `p_kl`; `at a time` is these at 8,192 positions.
"""
POSITIONS = {"starts": (784, 27.2), "drop": (2037, 66.1), "rest": (2037, 66.1), "cover": (3198, 73.5)}
"""`byte_prefix` with a teacher of 262,144 tokens, half of them two tokens for the student: at 2,048 positions, or at
the starts of their 1,365 chunks.
"""
SHARE_OF_PRODUCT = 0.01
"""Operations outside of products, one for each fp32 number read or written, as a share of the product with the
teacher's head. Their bytes are many more: 28 GB (36 with cover, 4 at starts), next to 23 to 38 GB of all products.
"""
ELEMENTWISE = 9.2
"""GB that the three losses together may read and write for 2,048 tokens outside of their products."""


@pytest.fixture(scope="module")
def traffic() -> dict[str, Any]:
    by_loss: dict[str, Any] = json.loads(processes.program("tests.losses.traffic"))
    return by_loss


@pytest.mark.parametrize("name", BUDGETS)
def test_a_loss_keeps_to_its_budgets(traffic: dict[str, Any], name: str) -> None:
    """Bugs: another pass over rows of logits, a copy of them, a kernel for each unit."""
    kernels, gigabytes = BUDGETS[name]
    assert 0.5 * kernels < traffic[name]["kernels"] <= kernels
    assert 0.5 * gigabytes < traffic[name]["bytes"] / 1e9 <= gigabytes


def test_few_bytes_are_moved_besides_products(traffic: dict[str, Any]) -> None:
    """In the recipes' microbatches; each rounds the gradient of the head's weight once. Bug: an unfused pass."""
    work = traffic["at a time"]
    gigabytes = work["elementwise"] / work["positions"] * 2048 / 1e9
    assert 0.5 * ELEMENTWISE < gigabytes <= ELEMENTWISE


@pytest.mark.parametrize("ends", POSITIONS)
def test_targets_at_all_positions_keep_to_their_budgets(traffic: dict[str, Any], ends: str) -> None:
    """Bugs: a comparison that is not one compiled function, another table of masks or logits, a wait for the device."""
    kernels, gigabytes = POSITIONS[ends]
    work = traffic["positions"][ends]
    assert 0.5 * kernels < work["kernels"] <= kernels
    assert 0.5 * gigabytes < work["bytes"] / 1e9 <= gigabytes
    assert work["elementwise"] / 4 <= SHARE_OF_PRODUCT * work["product"]
    assert not work["waits"]


@pytest.mark.parametrize("name", BUDGETS)
def test_the_host_waits_for_nothing(traffic: dict[str, Any], name: str) -> None:
    """Bug: a count that is read back, which stalls the device."""
    assert not traffic[name]["waits"]
    assert sum(traffic[name]["copies"].values()) <= 5
