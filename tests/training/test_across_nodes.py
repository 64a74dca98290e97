"""Two Ray nodes on this machine: ranks are placed as planned, teachers on another node send their output, the metrics
equal a single-process run's, and the death of a rank or a node ends the run.
"""

import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import ray
import torch
from safetensors.torch import load_file

from nemo_opd.cluster.placement import Placement
from nemo_opd.cluster.ray.ray_cluster import RayCluster, RayGroup
from nemo_opd.config.cluster import Cluster
from nemo_opd.distributed.layout import Layout
from nemo_opd.errors import ClusterError
from nemo_opd.handoff.outputs import windows
from nemo_opd.handoff.slices import LayoutPair, Readers, Traffic
from nemo_opd.logging.loggers import read
from nemo_opd.preflight.plan import Delivery
from nemo_opd.training.groups import Links
from tests.cluster.toy import Toy
from tests.tiny import Tiny
from tests.training.launch import Run, run_here, start
from tests.training.linked import LENGTHS, VOCAB, Learning, Teaching, hidden

if TYPE_CHECKING:
    from ray.cluster_utils import Cluster as Nodes

pytestmark = pytest.mark.ray
TIMEOUT_S = 300.0
AT_ONCE_S = 60.0
"""Far below TIMEOUT_S, and more than Ray needs to notice a death on a busy machine."""
STEPS = 4


def overrides(tiny: Tiny, *more: str) -> list[str]:
    validates = f"train.validate_every={STEPS // 2}"
    return tiny.overrides(f"train.max_steps={STEPS}", validates, "loss.scaling=dynamic", *more)


@pytest.fixture(scope="module")
def in_one_process(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output directory of the run in one process."""
    return run_here(tmp_path_factory.mktemp("one") / "run", overrides(tiny))


@pytest.fixture(scope="module")
def run(nodes: "Nodes", tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The student over both nodes, a tensor-parallel teacher on the first and another teacher on the second."""
    arguments = overrides(
        tiny,
        f"++cluster.address={nodes.address}",
        "++cluster.num_nodes=2",
        "++cluster.cpu_ranks=2",
        "++cluster.placement=separate",
        "++cluster.teacher_ranks=[2,1]",
        "++teachers.0.parallelism.tp=2",
    )
    run = start(tmp_path_factory.mktemp("across") / "run", arguments)
    run.wait_for_step(1)
    assert run.end() == 0, run.output
    return run


def test_metrics_are_those_of_one_process(in_one_process: Path, run: Run) -> None:
    """Bugs: rows of another rank or batch, a batch overwritten by the next one or by validation, lost precision."""
    assert len(run.metrics) == STEPS + 1
    for expected, actual in zip(read(in_one_process / "metrics.jsonl"), run.metrics, strict=True):
        names = [name for name in expected if not name.startswith("perf/")]
        assert {name: actual[name] for name in names} == pytest.approx(
            {name: expected[name] for name in names}, rel=1e-6
        ), expected["step"]


def test_weights_are_those_of_one_process(in_one_process: Path, run: Run) -> None:
    ours, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (run.output_dir, in_one_process))
    assert ours.keys() == theirs.keys()
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-5, atol=1e-6)


def test_a_teacher_that_dies_while_it_sends(nodes: "Nodes") -> None:
    """Bug: the student waits for the dead teacher until its timeout, or the message does not name the teacher."""
    placement = Placement.consecutive([1, 1], together=[1, 1], num_nodes=2)
    sides = LayoutPair(Layout(1), Layout(1), placement.student, placement.teachers[0])
    delivery = Delivery(sides, (Readers((), (), sends_head=True),), (Traffic(1, 1),))
    settings = Cluster(address=nodes.address, num_nodes=2, timeout_s=TIMEOUT_S)
    with (
        RayCluster(settings, device="cpu", placement=placement) as cluster,
        RayGroup(cluster, "teacher big", Teaching, {}, placement.teachers[0]) as teacher,
        RayGroup(cluster, "student", Learning, {}, placement.student) as student,
    ):
        student.cluster.gather([student.ready, teacher.ready])
        assert nodes_of(student) != nodes_of(teacher)
        links = Links(student, [teacher], [delivery])
        for batch in (1, 2):
            student_windows = windows(teacher.call("forward", [(batch, False)]), sides, LENGTHS)
            links.transfer([student_windows], f"step {batch}")
            (read,) = student.call("read", [(student_windows[0],)])
            expected = hidden(batch).sum(-1).reshape(-1, 1).expand(-1, VOCAB)
            torch.testing.assert_close(read, expected, rtol=1e-5, atol=1e-6)
            assert read.shape == (sum(LENGTHS), VOCAB)

        student_windows = windows(teacher.call("forward", [(3, True)]), sides, LENGTHS)
        begin = time.monotonic()
        with pytest.raises(ClusterError) as caught:
            links.transfer([student_windows], "step 3")
        assert time.monotonic() - begin < AT_ONCE_S
        message = str(caught.value)
        assert message.startswith("teacher big rank 0 died while sending its output to other nodes (step 3) (")
        assert message.endswith("run.resume=auto continues from the last checkpoint")


def nodes_of(group: RayGroup) -> list[str]:
    """Return Ray's id of each rank's node."""
    nodes: list[str] = ray.get(
        [actor.__ray_call__.remote(lambda _: ray.get_runtime_context().get_node_id()) for actor in group.actors]
    )
    return nodes


def settings(nodes: "Nodes") -> Cluster:
    return Cluster(address=nodes.address, num_nodes=2, timeout_s=120)


def test_more_nodes_than_there_are(nodes: "Nodes", monkeypatch: pytest.MonkeyPatch) -> None:
    placement = Placement.colocated(num_nodes=3, ranks_per_node=1, num_teachers=1)
    few = settings(nodes).model_copy(update={"timeout_s": 1.0})
    with pytest.raises(
        ClusterError, match=r"^cluster.num_nodes=3 nodes with 2 CPU each: .* has 2 such .*num_nodes=2, "
    ):
        RayCluster(few, device="cpu", placement=placement)


def test_ranks_land_as_planned_and_a_lost_node_ends_the_wait(nodes: "Nodes", tmp_path: Path) -> None:
    """Bug: the driver waits for ranks on a lost node. A student rank and the teacher rank it reads share a node.

    The last test of the module, because it removes a node.
    """
    placement = Placement.separate(num_nodes=2, student_per_node=1, teachers_per_node=(1,))
    with (
        RayCluster(settings(nodes), device="cpu", placement=placement) as cluster,
        RayGroup(cluster, "student", Toy, {}, placement.student) as student,
    ):
        with RayGroup(cluster, "teacher", Toy, {}, placement.teachers[0]) as teacher:
            student.cluster.gather([student.ready, teacher.ready])
            ours, theirs = nodes_of(student), nodes_of(teacher)
        assert student.call("sum_of_ranks", [(0,)] * 2) == [(0, 1.0), (1, 1.0)], "one world over both nodes"
        assert len(set(ours)) == 2
        assert theirs == ours
        (lost,) = nodes.worker_nodes
        rank = ours.index(lost.node_id)
        waiting = student.submit("wait_for", [(tmp_path / "what never comes",)] * 2)
        nodes.remove_node(lost, allow_graceful=False)
        with pytest.raises(ClusterError, match=rf"^student rank {rank} died while in 'wait_for' \("):
            student.cluster.gather([waiting])
