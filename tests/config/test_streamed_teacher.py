"""What does not go together with a teacher whose layers come and go."""

import copy
from typing import Any

import pytest

from tests.config.settings import SAME, VALID, message_of


def said_of(teacher: dict[str, Any]) -> str:
    return message_of(copy.deepcopy(VALID) | {"teachers": [{**SAME, "offload": "layers"} | teacher]})


@pytest.mark.parametrize(
    ("teacher", "says"),
    [
        (
            {"compile": True},
            "teachers.0.offload=layers: with compile=true, layers cannot be moved one by one; leave c",
        ),
        ({"parallelism": {"reshard_after_forward": False}}, "with parallelism.reshard_after_forward=false, layers"),
        ({"model": None, "weights": "ema"}, "teachers.0.offload=layers: with weights=ema, layers"),
    ],
)
def test_weights_that_stay_or_are_compiled(teacher: dict[str, Any], says: str) -> None:
    """Bug: layers are taken away under code, or under gathered weights, that goes on with them."""
    assert says in said_of(teacher)
