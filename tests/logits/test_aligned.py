"""Rows of logits and gradients are aligned on a GPU, and losses are the same: on one that is pretended."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    by_case: dict[str, Any] = json.loads(processes.program("tests.logits.aligned"))
    return by_case


def test_products_have_aligned_rows(differences: dict[str, Any]) -> None:
    """Bug: with Qwen3's 151,669 columns cuBLAS fell back to kernels of earlier GPUs."""
    assert all(of["misaligned_before"] for of in differences.values())
    assert {name: of["misaligned"] for name, of in differences.items() if of["misaligned"]} == {}


def test_a_loss_and_its_gradient_are_the_same_to_the_last_bit(differences: dict[str, Any]) -> None:
    """Bug: a gradient in columns beyond the vocabulary, or a loss that reads them. The case's products are exact."""
    assert [name for name, of in differences.items() if not of["is_equal"]] == []
