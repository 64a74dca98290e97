"""Which groups work at the same time, and with how many threads; no process is started."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from nemo_opd.cluster.group import Call, Cluster, Group, submit_sequentially
from nemo_opd.cluster.placement import Placement


class RecordedCluster(Cluster):
    """A cluster that records the begin of calls, and their end once it was waited for."""

    timeout_s = 1.0

    def __init__(self) -> None:
        self.begun: list[Call] = []
        self.ended: list[Call] = []
        self.together: set[frozenset[str]] = set()
        """Pairs of groups that worked at the same time."""

    def group(self, *_: Any) -> Group:
        raise AssertionError("groups are made below")

    def gather(self, calls: Sequence[Call]) -> list[list[Any]]:
        self.ended += calls
        return [[] for _ in calls]

    def close(self) -> None:
        pass


class RecordedGroup(Group):
    cluster: RecordedCluster

    def submit(self, method: str, arguments: Any = None, *, about: str = "") -> Call:
        call = Call(self.name, method, about)
        running = {call.group for call in self.cluster.begun if call not in self.cluster.ended}
        self.cluster.together |= {frozenset({self.name, group}) for group in running}
        self.cluster.begun.append(call)
        return call

    def address(self) -> tuple[str, int]:
        raise AssertionError("nothing is sent")

    def close(self) -> None:
        pass


def together(placement: Placement) -> set[frozenset[str]]:
    cluster = RecordedCluster()
    groups = [RecordedGroup(cluster, f"teacher {i}", places) for i, places in enumerate(placement.teachers)]
    calls = submit_sequentially([(group, partial(group.submit, "forward")) for group in groups])
    assert [call.group for call in calls] == [group.name for group in groups]
    assert len(cluster.ended) == len(set(map(id, cluster.ended))), "each is waited for once"
    return cluster.together


@pytest.mark.parametrize("num_teachers", [1, 2, 4])
def test_teachers_on_the_same_devices_take_turns(num_teachers: int) -> None:
    """Bug: forward passes of several teachers share a GPU, which then holds the activations of all."""
    assert together(Placement.colocated(num_nodes=2, ranks_per_node=4, num_teachers=num_teachers)) == set()


def test_teachers_on_separate_devices_work_at_the_same_time() -> None:
    """Bug: teachers on separate devices take turns, so devices are idle."""
    names = [frozenset({f"teacher {i}", f"teacher {j}"}) for i in range(3) for j in range(i)]
    separate = Placement.separate(num_nodes=2, student_per_node=2, teachers_per_node=(2, 1, 3))
    assert together(separate) == set(names)
    one_device_in_common = Placement(separate.student, (*separate.teachers[:2], separate.teachers[1][:1]))
    assert together(one_device_in_common) == {names[0], names[1]}


@pytest.mark.parametrize(
    ("placement", "threads"),
    [
        (Placement.colocated(num_nodes=1, ranks_per_node=1, num_teachers=3), 16),
        (Placement.colocated(num_nodes=1, ranks_per_node=4, num_teachers=2), 4),
        (Placement.colocated(num_nodes=2, ranks_per_node=4, num_teachers=2), 4),
        (Placement.separate(num_nodes=1, student_per_node=2, teachers_per_node=(1, 1)), 4),
        (Placement.separate(num_nodes=1, student_per_node=20, teachers_per_node=(1,)), 1),
    ],
)
def test_processes_that_work_at_a_time_share_the_cores(
    placement: Placement, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bugs: cores are idle while a process waits for its turn; more threads than cores."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert placement.num_threads(16) == threads


@pytest.mark.parametrize(("variables", "threads"), [({}, 3), ({"TORCHELASTIC_RUN_ID": "1"}, 16)])
def test_the_usual_variable_decides(variables: dict[str, str], threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bugs: the user's OMP_NUM_THREADS is ignored; torchrun's default of one thread is used although cores are free."""
    for name, value in {"OMP_NUM_THREADS": "3", **variables}.items():
        monkeypatch.setenv(name, value)
    assert Placement.colocated(num_nodes=1, ranks_per_node=1, num_teachers=1).num_threads(16) == threads
