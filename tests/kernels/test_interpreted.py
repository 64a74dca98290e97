"""Kernels against the PyTorch form of the losses, in Triton's interpreter: a process of its own, which sets it up."""

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
"""As a share of the largest number: fp32 rounds logits of up to 150 by that much."""
FP32 = 2**-20
"""The same of others."""
SCALARS = 4 * 24
"""Bytes of single numbers that a program reads or writes of a row, at most."""
ROWS = 5


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("interpreted") / "results.json"
    processes.start(write_results, (file,), 1)
    by_case: dict[str, Any] = json.loads(file.read_text())
    return by_case


@pytest.mark.parametrize("name", NAMES)
def test_a_loss_and_its_gradient_are_those_of_pytorch(found: dict[str, Any], name: str) -> None:
    """Bugs: a row or column of another unit, a sum in the wrong order of scales, NaN of what is empty."""
    of = found[name]
    assert of["is_finite"]
    assert of["kernels"]["gradient of rows"] == (2 if name in ("mixture", "two-forms") else 1)
    assert of["error"] < LARGEST_ERROR.get(name, FP32)


@pytest.mark.parametrize("name", ["head-bf16", "wide-head-bf16"])
def test_a_gradient_that_is_put_once_is_rounded_once(found: dict[str, Any], name: str) -> None:
    """It is rounded to bf16, and so are the gradients that products with it make: 2^−8 each, of the largest number.

    Bug: columns of aligned rows beyond the vocabulary that nobody has written, in the gradient of a head that has them.
    """
    assert found[name]["kernels"]["gradient of rows"] == 1
    assert 0 < found[name]["error"] < 2 * 2**-8


@pytest.mark.parametrize("name", ["same_vocab", "strict-rest", "shared_prefix"])
def test_equal_sides_pull_at_nothing(found: dict[str, Any], name: str) -> None:
    """Rounding noise would pull at a student that is already right."""
    assert found[f"equal-{name}"]["kernels"]
    assert found[f"equal-{name}"]["error"] == 0


def test_what_is_not_a_number_is_seen(found: dict[str, Any]) -> None:
    """Bug: jsd with a teacher whose logits are NaN was a loss of 0, so that no step was skipped."""
    assert len(found["nan"]) == 3 * len(KINDS)
    assert all(found["nan"].values()), found["nan"]


def test_kernels_say_how_much_they_read_and_write(found: dict[str, Any]) -> None:
    """Counted in the interpreter: vectors of rows as often as they are read, maps once, and some numbers a row."""
    for name, said, moved, maps in found["bytes"]["kernels"]:
        assert moved <= said <= moved + maps + ROWS * SCALARS, name


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_layers_are_those_of_pytorch(found: dict[str, Any], dtype: str) -> None:
    """Bugs: a row of another program, a head's stride, a sign of the rotation back, digits lost before a product.

    In bf16 they round where PyTorch does, so that results are equal to the last bit and gradients as far from exact
    ones as PyTorch's, to half of the last digit of the largest number.
    """
    of_type = {name: each for name, each in found["layers"]["functions"].items() if name.endswith(dtype)}
    assert len(of_type) == 7
    for name, each in of_type.items():
        if dtype == "float32":
            assert max(each["forward"], each["gradient"]) < FP32, name
        else:
            assert each["forward"] == 0, name
            assert 0 < each["gradient"] <= each["of PyTorch"] + 2**-9, name


def test_models_with_kernels_in_their_layers_learn_the_same(found: dict[str, Any]) -> None:
    """Bugs: a part of another family's code that is taken for one that is known, positions of a packed row."""
    models = found["layers"]["models"]
    for name, of in models.items():
        assert of["error"] < 16 * FP32, name
    all_parts = ["gradient of rms_norm", "gradient of swiglu", "rms_norm", "rotary", "swiglu"]
    rotary_alone = {"gemma3, two rotary embeddings"}
    assert {name: of["kernels"] for name, of in models.items()} == {
        name: ["rotary"] if name in rotary_alone else all_parts for name in models
    }


def test_kernels_of_layers_say_how_much_they_read_and_write(found: dict[str, Any]) -> None:
    """All of it but what is read again from a cache: a norm's weight by each program, a table by keys."""
    counted = found["layers"]["bytes"]
    assert {name for name, *_ in counted} == {
        *("rms_norm", "gradient of rms_norm", "swiglu", "gradient of swiglu", "rotary")
    }
    for name, said, moved in counted:
        assert said <= moved <= 1.6 * said, name
