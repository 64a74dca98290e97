"""Rows of logits and gradients are aligned on a (pretended) GPU, and losses stay the same."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world


@pytest.fixture(scope="module")
def differences() -> dict[str, Any]:
    results: dict[str, Any] = json.loads(processes.program("tests.logits.aligned"))
    return results


def test_products_have_aligned_rows(differences: dict[str, Any]) -> None:
    """Bug: with Qwen3's 151,669 columns cuBLAS uses slow kernels for earlier GPUs."""
    assert all(result["misaligned_before"] for result in differences.values())
    assert {name: result["misaligned"] for name, result in differences.items() if result["misaligned"]} == {}


def test_a_loss_and_its_gradient_are_the_same_to_the_last_bit(differences: dict[str, Any]) -> None:
    """Bug: a gradient in columns beyond the vocabulary, or a loss that reads them. Products are exact here."""
    assert [name for name, result in differences.items() if not result["is_equal"]] == []
