"""Two Ray nodes on this machine: ranks land where they were planned, a lost node is noticed."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.ray.cluster import RayCluster, RayGroup
from nemo_opd.config.cluster import Cluster
from nemo_opd.errors import ClusterError
from tests.cluster.toy import Toy

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster as Nodes

pytestmark = pytest.mark.ray


def settings(nodes: "Nodes") -> Cluster:
    return Cluster(address=nodes.address, num_nodes=2, timeout_s=120)


def test_ranks_land_as_planned(nodes: "Nodes") -> None:
    """A node each, and what a rank of the student reads is on its own."""
    placement = Placement.separate(num_nodes=2, student_per_node=1, teachers_per_node=(1,))
    with (
        RayCluster(settings(nodes), device="cpu", placement=placement) as cluster,
        RayGroup(cluster, "student", Toy, {}, placement.student) as student,
        RayGroup(cluster, "teacher", Toy, {}, placement.teachers[0]) as teacher,
    ):
        student.cluster.gather([student.ready, teacher.ready])
        ours, theirs = ([node for node, _ in group.whereabouts()] for group in (student, teacher))
        assert student.call("sum_of_ranks", [(0,)] * 2) == [(0, 1.0), (1, 1.0)], "one world over both nodes"
    assert len(set(ours)) == 2
    assert theirs == ours


def test_more_nodes_than_there_are(nodes: "Nodes", monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement.colocated(num_nodes=3, ranks_per_node=1, num_teachers=1)
    few = settings(nodes).model_copy(update={"timeout_s": 1.0})
    with pytest.raises(
        ClusterError, match=r"^cluster.num_nodes=3 nodes with 2 CPU each: .* has 2 such .*num_nodes=2, "
    ):
        RayCluster(few, device="cpu", placement=placement)


def test_lost_node_ends_the_wait(nodes: "Nodes", tmp_path: Path) -> None:
    """Though the other rank goes on. The last test: it takes a node away."""
    placement = Placement.colocated(num_nodes=2, ranks_per_node=1, num_teachers=0)
    with (
        RayCluster(settings(nodes), device="cpu", placement=placement) as cluster,
        RayGroup(cluster, "student", Toy, {}, placement.student) as group,
    ):
        group.cluster.gather([group.ready])
        homes = [node for node, _ in group.whereabouts()]
        (lost,) = nodes.worker_nodes
        rank = homes.index(lost.node_id)
        waiting = group.submit("wait_for", [(tmp_path / "what never comes",)] * 2)
        nodes.remove_node(lost, allow_graceful=False)
        with pytest.raises(ClusterError, match=rf"^student rank {rank} died while in 'wait_for' \("):
            group.cluster.gather([waiting])
