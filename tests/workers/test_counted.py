"""What a training step asks of a GPU, counted on one that is none: the host waits once a step, whatever it reads."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world

COPIES = 13
"""Of a microbatch of the student: its tensors, its packing, the places of teachers' tokens, and plans of losses."""
KERNELS = {
    "p_kl": 506,
    "strict": 500,
    "weights by sequence": 514,
    "a sequence a document": 470,
    "logits": 506,
}
"""Of a microbatch of the student, model and optimizer included; budgets, to be lowered with what is saved."""


MEGABYTES = {
    "p_kl": 98,
    "strict": 82,
    "weights by sequence": 98,
    "a sequence a document": 103,
    "logits": 110,
}
"""Read and written by the student's kernels for 1,000 tokens, likewise."""
ON_SAMPLES = {"tcad": (19, 711), "sampled_kl, sequences": (26, 947), "grpo": (25, 791)}
"""Copies and kernels of a microbatch of samples, as budgets."""


@pytest.fixture(scope="module")
def off_policy() -> dict[str, Any]:
    return program("off-policy", *KERNELS)


@pytest.fixture(params=KERNELS)
def counted(request: pytest.FixtureRequest, off_policy: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    return request.param, off_policy[request.param]


@pytest.fixture(scope="module")
def on_samples() -> dict[str, Any]:
    return program("on-policy", *ON_SAMPLES)


def program(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(processes.program("tests.workers.counted", *arguments))
    return found


def test_the_host_waits_for_metrics_once_a_step(counted: tuple[str, dict[str, Any]]) -> None:
    _, found = counted
    assert_waits_once(found)


@pytest.mark.parametrize("loss", ON_SAMPLES)
def test_the_host_knows_what_was_sampled(on_samples: dict[str, Any], loss: str) -> None:
    """Bugs: masks of samples, or numbers of tokens, that are made on the device; maxima that are compared there."""
    found, (copies, kernels) = on_samples[loss], ON_SAMPLES[loss]
    assert_waits_once(found)
    assert all("distributed/transfer.py" in place for place in found["student"]["copies"])
    assert sum(found["student"]["copies"].values()) <= copies * found["microbatches"]
    assert 0.5 * kernels < found["student"]["kernels"] / found["microbatches"] <= kernels


def assert_waits_once(found: dict[str, Any]) -> None:
    assert found["microbatches"] > 1
    ((place, number),) = found["student"]["waits"].items()
    assert "workers/step.py" in place
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


def test_tokens_have_no_more_bytes_than_their_budget(counted: tuple[str, dict[str, Any]]) -> None:
    """Bug: another pass over rows of logits, or a copy of them."""
    name, found = counted
    megabytes = found["student"]["bytes"] / found["tokens"] / 1e3
    assert 0.5 * MEGABYTES[name] < megabytes <= MEGABYTES[name]


def test_teachers_wait_for_their_scores_alone(counted: tuple[str, dict[str, Any]]) -> None:
    name, found = counted
    scores = 2 if name == "weights by sequence" else 0
    assert sum(found["teachers"]["waits"].values()) == scores, found["teachers"]["waits"]
