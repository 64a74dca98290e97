"""Calls on several ranks: results by rank, the first failure at once, time limits, and no process left at the end."""

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest
from ray.exceptions import RpcError

from nemo_opd import progress
from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.ray import ray_cluster, ray_session
from nemo_opd.cluster.ray.calls import gather
from nemo_opd.cluster.ray.ray_cluster import RayCluster, RayGroup
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import ClusterError, WorkerError
from nemo_opd.progress import current
from tests.cluster.ray.shared.conftest import TWO_GROUPS
from tests.cluster.toy import HANG_S, Toy
from tests.waiting import CLEAN_S, wait_until

pytestmark = pytest.mark.ray


def test_results_are_by_rank_and_ranks_share_a_world(group: RayGroup) -> None:
    assert group.call("sum_of_ranks", [(10,), (20,)]) == [(0, 31.0), (1, 31.0)]


def test_several_calls_are_gathered_in_order(group: RayGroup) -> None:
    calls = [group.submit("sum_of_ranks", [(offset,)] * 2) for offset in (0, 100)]
    assert group.cluster.gather(calls) == [[(0, 1.0), (1, 1.0)], [(0, 201.0), (1, 201.0)]]


@pytest.mark.parametrize("rank", [0, 1])
def test_failure_on_one_rank_is_raised_while_the_other_hangs(group: RayGroup, rank: int, tmp_path: Path) -> None:
    """Bug: ranks are waited for in order, so a rank that hangs in a collective hides the failed one."""
    file = tmp_path / "may end"
    with pytest.raises(WorkerError) as caught:
        group.call("fail_while_others_wait", [(rank, file)] * 2)
    file.touch()
    error = caught.value
    assert (error.group, error.rank) == ("toys", rank)
    assert error.error == "KeyError: 'no such thing' (while in 'fail_while_others_wait')"
    assert "fail_while_others_wait" in error.traceback
    assert str(error) == f"toys rank {rank} failed: {error.error}"
    assert len(group.call("sum_of_ranks", [(0,)] * 2)) == 2, "the other rank has ended its wait"


def test_result_that_cannot_travel_is_a_worker_error(group: RayGroup) -> None:
    with pytest.raises(WorkerError, match="toys rank"):
        group.call("unpicklable")


def test_no_result_within_the_limit_is_a_cluster_error(group: RayGroup, tmp_path: Path) -> None:
    file = tmp_path / "may end"
    with pytest.raises(ClusterError, match=r"toys ranks 0, 1: still in 'wait_for' after cluster.timeout_s=0.5 s"):
        gather([group.submit("wait_for", [(file,)] * 2)], timeout_s=0.5)
    file.touch()
    assert len(group.call("sum_of_ranks", [(0,)] * 2)) == 2, "the group is whole again once it is done"


def test_what_a_worker_does_is_seen_while_it_is_waited_for(
    group: RayGroup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "_under_way", [])  # an error that another test keeps may hold work
    file = tmp_path / "may end"
    with ThreadPoolExecutor(1) as threads:
        call = threads.submit(group.call, "wait_for", [(file,)] * 2)
        wait_until(lambda: (work := current()) is not None and work.name == "toys: waiting", "the worker's work")
        file.touch()
        call.result()
    assert current() is None


def test_a_mistake_found_while_loading_is_told_and_processes_end(cluster: RayCluster) -> None:
    earlier_ranks = rank_processes()
    with (
        pytest.raises(WorkerError, match=r"teacher t rank \d failed: ModelError: teachers.1.model=cut: ") as caught,
        RayGroup(cluster, "teacher t", Toy, {"refused": "teachers.1.model=cut: …"}, TWO_GROUPS.teachers[0]) as teacher,
    ):
        teacher.cluster.gather([teacher.ready])
    assert not hasattr(caught.value, "__notes__"), "no traceback for a user's mistake"
    wait_for_end(rank_processes() - earlier_ranks)


def test_a_dead_process_is_named_by_whoever_misses_it_first(
    cluster: RayCluster, group: RayGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bug: the error is the student's missing buffer, because nobody waits for a teacher that is a batch ahead."""
    monkeypatch.setattr(cluster, "is_broken", False)
    monkeypatch.setattr(cluster, "under_way", {})  # a call that nobody gathers would explain later deaths
    with RayGroup(cluster, "senders", Toy, {}, TWO_GROUPS.teachers[0]) as senders:
        cluster.gather([senders.ready])
        senders.submit("die", [(1,)] * 2, about="step 9")
        with pytest.raises(ClusterError, match=r"^senders rank 1 died while in 'die' \(step 9\) \(its process on "):
            group.call("miss_a_sender")


def test_dead_process_is_one_cluster_error(group: RayGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: `close` waits for the other rank, which hangs. The last test of the shared group."""
    with pytest.raises(ClusterError) as caught:
        group.call("die", [(1,)] * 2)
    assert str(caught.value).startswith("toys rank 1 died while in 'die' (its process on ")
    assert not isinstance(caught.value, WorkerError)
    assert group.cluster.is_broken, "so that no rank is asked to leave"
    monkeypatch.setattr(group.cluster, "is_broken", False)
    monkeypatch.setattr(ray_cluster, "LEAVE_S", 2.0)
    ranks = rank_processes()
    start = time.monotonic()
    group.close()
    assert 2.0 <= time.monotonic() - start < HANG_S
    wait_for_end(ranks)


def test_more_than_the_cluster_has_is_a_cluster_error(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a placement of 3 ranks waits without end in a session with room for 2."""
    larger = Placement.colocated(num_nodes=1, ranks_per_node=3, num_teachers=1)
    monkeypatch.setattr(cluster, "placement", larger)
    monkeypatch.setattr(cluster, "timeout_s", 1.0)
    with pytest.raises(ClusterError, match=r"3 ranks of {'CPU': 2} are not free .* lower cluster.num_nodes"):
        cluster._reserve()


def test_what_is_no_ray_cluster_is_a_cluster_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: a traceback if a web server, say, listens at the address."""

    def no_answer(address: str) -> None:
        raise RpcError("Timed out while waiting for GCS to become available")

    monkeypatch.setattr(ray_session, "probe", no_answer)
    with pytest.raises(ClusterError, match=r"address=127.0.0.1:80: no Ray cluster answers there \(Timed out"):
        RayCluster(Cluster(address="127.0.0.1:80"), device="cpu", placement=TWO_GROUPS)


def test_cluster_that_does_not_answer_is_a_cluster_error_at_once() -> None:
    """Bug: Ray retries for minutes."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ClusterError, match=f"cluster.address={address}: no Ray cluster answers there"):
            RayCluster(Cluster(address=address), device="cpu", placement=TWO_GROUPS)


def rank_processes() -> set[psutil.Process]:
    return {process for process in psutil.Process(os.getpid()).children(recursive=True) if is_rank(process)}


def is_rank(process: psutil.Process) -> bool:
    """Return whether a child is a rank; False if it has ended in the meantime."""
    try:
        return "RankActor" in process.name() or "RankActor" in " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return False


def wait_for_end(processes: set[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=CLEAN_S)
    assert not alive
