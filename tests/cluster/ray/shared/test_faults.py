"""Faults of a worker in every phase: one clear message in bounded time, and no process stays.

One pair of workers for all tests, as processes take seconds to start.
"""

import time
from collections.abc import Iterator

import psutil
import pytest

from nemo_opd.cluster.ray.ray_cluster import RayCluster, RayGroup
from nemo_opd.errors import ClusterError, WorkerError
from tests.cluster.ray.shared.conftest import TWO_GROUPS
from tests.training.faulty_rank import Faulty
from tests.waiting import CLEAN_S

pytestmark = pytest.mark.ray
AT_ONCE_S = 60.0
"""Far below cluster.timeout_s, and more than Ray needs to notice on a busy machine."""


@pytest.fixture(scope="module")
def teacher(cluster: RayCluster) -> Iterator[RayGroup]:
    """Start two ranks, which survive all faults except the last test's."""
    with RayGroup(cluster, "teacher big", Faulty, {}, TWO_GROUPS.teachers[0]) as group:
        group.cluster.gather([group.ready])
        yield group


@pytest.fixture
def at_once() -> Iterator[None]:
    started = time.monotonic()
    yield
    assert time.monotonic() - started < AT_ONCE_S


def test_killed_while_loading(cluster: RayCluster) -> None:
    """Bug: the other rank waits for the dead one to join their world."""
    with (
        pytest.raises(ClusterError, match=r"^student rank 1 died while loading its model \("),
        RayGroup(cluster, "student", Faulty, {"dying_rank": 1}, TWO_GROUPS.student) as group,
    ):
        group.cluster.gather([group.ready])
    _, alive = psutil.wait_procs(ranks(), timeout=CLEAN_S)
    assert not alive


def test_out_of_memory(teacher: RayGroup, at_once: None) -> None:
    with pytest.raises(WorkerError) as caught:
        teacher.call("forward", [("takes_too_much", 1)] * 2, about="step 12")
    message = str(caught.value)
    assert message.startswith(
        "teacher big rank 1 failed: ClusterError: out of main memory in reading a batch: cannot allocate 4294967296.00 "
    )
    assert "lower train.micro_batch_size or train.max_length; or use more ranks" in message
    assert message.endswith("(while reading a batch (step 12))")
    assert "\n" not in message


def test_no_shared_memory_for_the_handoff(teacher: RayGroup, at_once: None) -> None:
    """Catches an error without a remedy when the operating system refuses shared memory."""
    with pytest.raises(WorkerError) as caught:
        teacher.call("forward", [("finds_shared_memory_full", 0)] * 2)
    message = str(caught.value)
    assert message.startswith("teacher big rank 0 failed: HandoffError: cannot allocate 0.00 GiB of shared memory")
    assert "lower train.global_batch_size or train.max_length" in message
    assert message.endswith("(while reading a batch)")


def test_hanging_collective(teacher: RayGroup, monkeypatch: pytest.MonkeyPatch, at_once: None) -> None:
    monkeypatch.setattr(teacher.cluster, "timeout_s", 1.0)
    with pytest.raises(ClusterError) as caught:
        teacher.call("train_step", [("hangs", 1)] * 2, about="step 12")
    assert str(caught.value).startswith(
        "teacher big ranks 0, 1: still training on a batch (step 12) after cluster.timeout_s=1 seconds; "
    )


def test_killed_in_a_collective(teacher: RayGroup, at_once: None) -> None:
    """Bug: the message names the surviving rank, whose error comes before Ray knows of the death.

    The last test of the group.
    """
    with pytest.raises(ClusterError) as caught:
        teacher.call("save", [("dies", 1)] * 2)
    message = str(caught.value)
    assert message.startswith("teacher big rank 1 died while writing a checkpoint (")
    assert message.endswith("run.resume=auto continues from the last checkpoint")
    assert "\n" not in message


def ranks() -> set[psutil.Process]:
    rank_processes = set()
    for process in psutil.Process().children(recursive=True):
        try:
            if "RankActor" in " ".join(process.cmdline()):
                rank_processes.add(process)
        except psutil.NoSuchProcess:
            continue
    return rank_processes
