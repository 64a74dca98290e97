"""The work of a training step on a pretended GPU: waits of the host, copies, kernels and bytes."""

import json
from typing import Any

import pytest

from tests import processes

pytestmark = pytest.mark.world

COPIES = 13
"""Copies of a student's microbatch: its tensors, its packing, positions of teachers' tokens, and plans of losses."""
KERNELS = {
    "p_kl": 506,
    "strict": 500,
    "weights by sequence": 514,
    "a sequence a document": 470,
    "logits": 506,
}
"""Budgets of kernels for a student's microbatch with model and optimizer; lower them if the code needs fewer."""
MEGABYTES = {
    "p_kl": 98,
    "strict": 82,
    "weights by sequence": 98,
    "a sequence a document": 103,
    "logits": 110,
}
"""Budgets of megabytes that the student's kernels read and write per 1,000 tokens."""
ON_SAMPLES = {"tcad": (19, 711), "sampled_kl, sequences": (26, 947), "grpo": (25, 791)}
"""Budgets of copies and kernels for a microbatch of rollouts."""


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
    counts: dict[str, Any] = json.loads(processes.program("tests.workers.counted", *arguments))
    return counts


def test_the_host_waits_for_metrics_once_a_step(counted: tuple[str, dict[str, Any]]) -> None:
    _, counts = counted
    assert_waits_once(counts)


@pytest.mark.parametrize("loss", ON_SAMPLES)
def test_rollouts_need_no_waits_and_few_copies_and_kernels(on_samples: dict[str, Any], loss: str) -> None:
    """Bugs: masks of rollouts, numbers of tokens or maxima are computed on the device and read by the host."""
    counts, (copies, kernels) = on_samples[loss], ON_SAMPLES[loss]
    assert_waits_once(counts)
    assert all("distributed/transfer.py" in place for place in counts["student"]["copies"])
    assert sum(counts["student"]["copies"].values()) <= copies * counts["microbatches"]
    assert 0.5 * kernels < counts["student"]["kernels"] / counts["microbatches"] <= kernels


def assert_waits_once(counts: dict[str, Any]) -> None:
    assert counts["microbatches"] > 1
    ((place, number),) = counts["student"]["waits"].items()
    assert "workers/step.py" in place
    assert number == 1


def test_a_microbatch_has_few_copies(counted: tuple[str, dict[str, Any]]) -> None:
    _, counts = counted
    copies = counts["student"]["copies"]
    assert all("distributed/transfer.py" in place for place in copies), "copies from pinned memory, without a wait"
    assert 0 < sum(copies.values()) <= COPIES * counts["microbatches"]


def test_a_microbatch_has_no_more_kernels_than_its_budget(counted: tuple[str, dict[str, Any]]) -> None:
    name, counts = counted
    kernels = counts["student"]["kernels"] / counts["microbatches"]
    assert 0.5 * KERNELS[name] < kernels <= KERNELS[name]


def test_tokens_have_no_more_bytes_than_their_budget(counted: tuple[str, dict[str, Any]]) -> None:
    """Bug: a further pass over rows of logits, or a copy of them."""
    name, counts = counted
    megabytes = counts["student"]["bytes"] / counts["tokens"] / 1e3
    assert 0.5 * MEGABYTES[name] < megabytes <= MEGABYTES[name]


def test_teachers_wait_for_their_scores_alone(counted: tuple[str, dict[str, Any]]) -> None:
    name, counts = counted
    scores = 2 if name == "weights by sequence" else 0
    assert sum(counts["teachers"]["waits"].values()) == scores, counts["teachers"]["waits"]
