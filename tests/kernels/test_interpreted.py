"""Kernels in Triton's interpreter, in a separate process, against PyTorch."""

import json
from typing import Any

import pytest

from tests import processes
from tests.kernels.interpreter import write_results
from tests.losses.cases import KINDS

pytest.importorskip("triton")
pytestmark = pytest.mark.world

NAMES = [
    *(f"together-{kind}" for kind, _ in KINDS),
    "extreme",
    *(f"infinite-{kind}" for kind in ("forward_kl", "reverse_kl", "jsd")),
    "mixture",
    "two-forms",
]
LARGEST_ERROR = {"extreme": 2**-17}
"""As a share of the largest number: the fp32 rounding of logits up to 150."""
FP32 = 2**-20
"""Tolerance of all other cases, also as a share of the largest number."""
SCALARS = 4 * 24
"""Largest number of bytes that a program reads and writes as single numbers, for each row."""
ROWS = 5


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("interpreted") / "results.json"
    processes.start(write_results, (file,), 1)
    results: dict[str, Any] = json.loads(file.read_text())
    return results


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_and_its_gradient_are_those_of_pytorch(results: dict[str, Any], name: str) -> None:
    """Bugs: a row or column of another unit, overflow in a sum, NaN for an empty cell."""
    result = results[name]
    assert result["is_finite"]
    assert result["kernels"]["gradient of rows"] == (2 if name in ("mixture", "two-forms") else 1)
    assert result["error"] < LARGEST_ERROR.get(name, FP32)


@pytest.mark.parametrize("name", ["head-bf16", "wide-head-bf16"])
def test_a_gradient_that_is_put_once_is_rounded_once(results: dict[str, Any], name: str) -> None:
    """Bug: unwritten columns of aligned rows beyond the vocabulary reach the gradient of a wider head.

    The gradient and its products are each rounded to bf16: 2^−8 of the largest number.
    """
    assert results[name]["kernels"]["gradient of rows"] == 1
    assert 0 < results[name]["error"] < 2 * 2**-8


@pytest.mark.parametrize("name", ["same_vocab", "strict-rest", "shared_prefix"])
def test_equal_sides_pull_at_nothing(results: dict[str, Any], name: str) -> None:
    """Bug: rounding noise moves a student that equals the teacher."""
    assert results[f"equal-{name}"]["kernels"]
    assert results[f"equal-{name}"]["error"] == 0


def test_what_is_not_a_number_is_seen(results: dict[str, Any]) -> None:
    """Bug: jsd with NaN logits of the teacher is 0, so the step is not skipped."""
    assert len(results["nan"]) == 3 * len(KINDS)
    assert all(results["nan"].values()), results["nan"]


def test_kernels_say_how_much_they_read_and_write(results: dict[str, Any]) -> None:
    """Bug: declared bytes differ from the interpreter's count: vectors at each read, maps once, some numbers a row."""
    for name, declared, moved, map_bytes in results["bytes"]["kernels"]:
        assert moved <= declared <= moved + map_bytes + ROWS * SCALARS, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_layers_are_those_of_pytorch(results: dict[str, Any], dtype: str) -> None:
    """Bugs: a row of another program, a head's stride, the sign of the inverse rotation, digits lost before a product.

    In bf16 kernels round at the same places as PyTorch: results are equal bit for bit, and gradients as far from exact
    as PyTorch's, up to half of the last digit of the largest number.
    """
    errors_by_function = {
        name: errors for name, errors in results["layers"]["functions"].items() if name.endswith(dtype)
    }
    assert len(errors_by_function) == 7
    for name, errors in errors_by_function.items():
        if dtype == "float32":
            assert max(errors["forward"], errors["gradient"]) < FP32, name
        else:
            assert errors["forward"] == 0, name
            assert 0 < errors["gradient"] <= errors["of PyTorch"] + 2**-9, name


def test_models_with_kernels_in_their_layers_learn_the_same(results: dict[str, Any]) -> None:
    """Bugs: a family's different code counts as known; positions of a packed row are wrong."""
    models = results["layers"]["models"]
    for name, model in models.items():
        assert model["error"] < 16 * FP32, name
    all_parts = ["gradient of rms_norm", "gradient of swiglu", "rms_norm", "rotary", "swiglu"]
    rotary_alone = {"gemma3, two rotary embeddings"}
    assert {name: model["kernels"] for name, model in models.items()} == {
        name: ["rotary"] if name in rotary_alone else all_parts for name in models
    }


def test_kernels_of_layers_say_how_much_they_read_and_write(results: dict[str, Any]) -> None:
    """Bug: declared bytes are far from the actual ones, which also count repeated reads from a cache."""
    counted = results["layers"]["bytes"]
    assert {name for name, *_ in counted} == {
        *("rms_norm", "gradient of rms_norm", "swiglu", "gradient of swiglu", "rotary")
    }
    for name, declared, moved in counted:
        assert declared <= moved <= 1.6 * declared, name
