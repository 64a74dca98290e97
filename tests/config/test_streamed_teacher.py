"""Settings that a teacher with offloaded layers excludes."""

import copy
from typing import Any

import pytest

from tests.config.settings import SAME, VALID, message_of


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
    """Bug: layers move away while compiled code or gathered weights still use them."""
    assert says in message_of(copy.deepcopy(VALID) | {"teachers": [{**SAME, "offload": "layers"} | teacher]})
