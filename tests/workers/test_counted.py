"""What a training step asks of a GPU, counted on one that is none: the host waits once a step, whatever it reads."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world

COPIES = 12
"""Of a microbatch of the student: its tensors, its packing, the places of teachers' tokens, and plans of losses."""
SETTINGS = {
    "p_kl": [],
    "strict": ["loss=strict"],
    "weights by sequence": ["aggregation.weights=bits_per_byte"],
    "a sequence a document": ["data.packing=false"],
}
KERNELS = {
    "p_kl": 529,
    "strict": 517,
    "weights by sequence": 538,
    "a sequence a document": 493,
}
"""Of a microbatch of the student, model and optimizer included; budgets, to be lowered with what is saved."""


@pytest.fixture(scope="module", params=SETTINGS)
def counted(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    return request.param, json.loads(processes.program("tests.workers.counted", *SETTINGS[request.param]))


def test_the_host_waits_for_metrics_once_a_step(counted: tuple[str, dict[str, Any]]) -> None:
    _, found = counted
    assert found["microbatches"] > 1
    ((place, number),) = found["student"]["waits"].items()
    assert "workers/student.py" in place
    assert number == 1


def test_a_microbatch_has_few_copies(counted: tuple[str, dict[str, Any]]) -> None:
    _, found = counted
    copies = found["student"]["copies"]
    assert all("distributed/transfer.py" in place for place in copies), "pinned, and not waited for"
    assert 0 < sum(copies.values()) <= COPIES * found["microbatches"]


def test_a_microbatch_has_no_more_kernels_than_its_budget(counted: tuple[str, dict[str, Any]]) -> None:
    name, found = counted
    kernels = found["student"]["kernels"] / found["microbatches"]
    assert 0.5 * KERNELS[name] < kernels <= KERNELS[name]


def test_teachers_wait_for_their_scores_alone(counted: tuple[str, dict[str, Any]]) -> None:
    name, found = counted
    scores = 2 if name == "weights by sequence" else 0
    assert sum(found["teachers"]["waits"].values()) == scores, found["teachers"]["waits"]
