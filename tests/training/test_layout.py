"""Devices of each group and the layout of its ranks: chosen or refused before a process starts."""

import re

import pytest
import torch

from nemo_opd.cluster.placement import Placement, Processes
from nemo_opd.config import RunConfig
from nemo_opd.config.cluster import Cluster
from nemo_opd.config.model import Parallelism
from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.errors import ConfigError
from nemo_opd.preflight.ranks import require_batch_divides, require_processes, resolve_layout, resolve_placement
from tests.composition import compose


@pytest.fixture(scope="module")
def demo() -> RunConfig:
    """The demo's settings, with two teachers."""
    return compose()


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)


def placed(config: RunConfig, device: str = "cuda", **cluster: object) -> Placement:
    settings = Cluster.model_validate({"address": "auto", **cluster})
    return resolve_placement(config.model_copy(update={"cluster": settings}), device)


def by_node(placement: Placement) -> list[list[list[int]]]:
    """Return each group's devices by node, in the order of ranks; fail if ranks are not sorted by node."""
    grouped = []
    for group in placement.groups:
        nodes = [place.node for place in group]
        assert nodes == sorted(nodes)
        grouped.append([[place.device for place in group if place.node == node] for node in range(placement.num_nodes)])
    return grouped


# Placement


def test_colocated_groups_have_the_same_place_at_each_rank(demo: RunConfig, gpus: None) -> None:
    placement = placed(demo, num_nodes=2)

    assert placement.student == tuple(Place(node, device) for node in (0, 1) for device in range(8))
    assert placement.teachers == (placement.student,) * 2
    assert (placement.num_processes, placement.groups_per_device, placement.devices_per_node) == (48, 3, 8)
    assert not placement.is_separate


@pytest.mark.parametrize(
    ("ranks", "student", "teachers"),
    [
        (None, [0, 1, 2, 3], ([4, 5], [6, 7])),
        (2, [0, 1, 2, 3, 4, 5], ([6], [7])),
        ((6, 4), [0, 1, 2], ([3, 4, 5], [6, 7])),
    ],
    ids=["equal shares", "one number", "one each"],
)
def test_separate_groups_share_out_every_node(
    demo: RunConfig, gpus: None, ranks: object, student: list[int], teachers: tuple[list[int], ...]
) -> None:
    """The student has the remaining devices, the same on every node, so it reads its teachers on its own node."""
    placement = placed(demo, num_nodes=2, placement="separate", teacher_ranks=ranks)

    assert by_node(placement) == [[devices] * 2 for devices in (student, *teachers)]
    assert placement.is_separate
    assert placement.devices_per_node == 8


def test_groups_that_nodes_cannot_share_equally_are_consecutive(demo: RunConfig, gpus: None) -> None:
    """Bug: the ranks of a tensor-parallel teacher are on two nodes."""
    wide = demo.teachers[0].model_copy(update={"parallelism": Parallelism(tp=8)})
    config = demo.model_copy(update={"teachers": (wide, demo.teachers[1])})
    placement = placed(config, num_nodes=2, placement="separate", teacher_ranks=(8, 1))

    student, first, second = placement.groups
    assert first == tuple(Place(0, device) for device in range(8))
    assert student == tuple(Place(1, device) for device in range(7))
    assert second == (Place(1, 7),)
    assert placement.devices_per_node == 8


def test_nodes_with_unequal_numbers_of_ranks(demo: RunConfig, gpus: None) -> None:
    odd = placed(demo, num_nodes=2, placement="separate", teacher_ranks=3)
    assert [len(group) for group in odd.groups] == [10, 3, 3]
    assert odd.devices == tuple(Place(node, device) for node in (0, 1) for device in range(8))
    cpu = placed(demo, "cpu", num_nodes=2, cpu_ranks=1, placement="separate")
    assert cpu.groups == ((Place(0, 0),), (Place(0, 1),), (Place(1, 0),))
    with pytest.raises(ConfigError, match=r"^cluster.num_nodes=4: .* 3 ranks in total, .* write cluster.num_nodes=3$"):
        placed(demo, "cpu", num_nodes=4, cpu_ranks=1, placement="separate")


@pytest.mark.parametrize(("ranks", "per_teacher"), [(None, 2), (1, 1), (4, 4)])
def test_separate_teachers_on_cpu_are_beside_the_student(demo: RunConfig, ranks: int | None, per_teacher: int) -> None:
    placement = placed(demo, "cpu", cpu_ranks=2, placement="separate", teacher_ranks=ranks)

    assert [len(group) for group in placement.groups] == [2, per_teacher, per_teacher]
    assert placement.groups_per_device == 1


@pytest.mark.parametrize("where", ["colocated", "separate"])
def test_a_teacher_with_the_students_weights_is_in_its_processes(demo: RunConfig, gpus: None, where: str) -> None:
    """Bugs: devices reserved for the teacher; GPUs that count as shared; no lookahead because of it."""
    average = demo.teachers[0].model_copy(update={"model": None, "weights": "ema"})
    config = demo.model_copy(update={"teachers": (average, demo.teachers[1])})
    placement = placed(config, placement=where)

    assert placement.teachers[0] == placement.student
    assert placement.num_processes == (8 if where == "separate" else 16)
    assert placement.groups_per_device == (1 if where == "separate" else 2)
    assert placement.is_separate == (where == "separate")
    assert not placed(config.model_copy(update={"teachers": (average,)})).is_separate


def test_without_teachers_the_student_has_all_devices(gpus: None) -> None:
    placement = placed(compose("loss.kd_weight=0"), placement="separate")

    assert len(placement.student) == 8
    assert placement.teachers == ()


@pytest.mark.parametrize(
    ("cluster", "message"),
    [
        (
            {"teacher_ranks": (1, 2, 3)},
            r"cluster.teacher_ranks=\[1, 2, 3\]: 3 numbers for 2 teachers; write one for ea",
        ),
        ({"teacher_ranks": 4}, "take 4 \\+ 4 of the 8 GPUs of the node, which leaves none .* lower it to 2 for each"),
        ({"gpus_per_node": 2}, "the student and 2 teachers need a GPU each, and the node has 2; .*=colocated$"),
        ({"gpus_per_node": 1}, "the student and 2 teachers need a GPU each, and the node has 1; .*=colocated$"),
        (
            {"num_nodes": 2, "teacher_ranks": 8},
            "take 8 \\+ 8 of the 16 GPUs of the cluster of 2 nodes, .* to 5 for each",
        ),
    ],
    ids=["length", "none left", "no share", "one GPU", "none left on two nodes"],
)
def test_too_few_devices(demo: RunConfig, gpus: None, cluster: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        placed(demo, placement="separate", **cluster)


def test_cpu_ranks_that_nodes_cannot_share(demo: RunConfig) -> None:
    with pytest.raises(ConfigError, match=r"cluster.cpu_ranks=3 is not a multiple of .* write cluster.cpu_ranks=4$"):
        placed(demo, "cpu", num_nodes=2, cpu_ranks=3)


def test_teacher_ranks_need_separate_teachers() -> None:
    with pytest.raises(ConfigError, match=r"cluster.teacher_ranks=2 has .* write cluster.placement=separate, or leave"):
        compose("++cluster.teacher_ranks=2")
    assert compose("++cluster.teacher_ranks=[2,1]", "++cluster.placement=separate").cluster.teacher_ranks == (2, 1)


# Layout


@pytest.mark.timeout(60)
def test_absurd_degrees_are_refused_at_once() -> None:
    """Bug: the search for a proposal tries every number up to the requested degree."""
    with pytest.raises(ConfigError, match=r"write student.parallelism.tp=4, student.parallelism.cp=1"):
        resolve_layout("student.parallelism", 4, Parallelism(tp=10**18, cp=10**18))


@pytest.mark.parametrize(
    ("num_ranks", "tp", "cp"),
    [(8, 3, 1), (8, 4, 4), (12, 8, 1), (8, 16, 1), (6, 5, 4), (7, 2, 2), (12, 8, 6)],
)
def test_a_refused_layout_comes_with_one_that_works(num_ranks: int, tp: int, cp: int) -> None:
    """Bugs: the proposal is refused too, or larger than the requested degrees."""
    with pytest.raises(ConfigError, match=r"^teachers\.1\.parallelism: tp=") as caught:
        resolve_layout("teachers.1.parallelism", num_ranks, Parallelism(tp=tp, cp=cp))
    proposed = {name: int(number) for name, number in re.findall(r"parallelism\.(tp|cp)=(\d+)", str(caught.value))}

    assert proposed["tp"] <= tp
    assert proposed["cp"] <= cp
    assert resolve_layout("teachers.1.parallelism", num_ranks, Parallelism(**proposed)).size == num_ranks


def test_proposed_degrees_are_the_largest() -> None:
    with pytest.raises(ConfigError, match=r"write student.parallelism.tp=4, student.parallelism.cp=2"):
        resolve_layout("student.parallelism", 8, Parallelism(tp=6, cp=4))


def test_ranks_on_a_cpu_are_not_counted_as_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bug: on a machine without a GPU, the message proposes `gpus_per_node=2`, which is already set."""
    monkeypatch.setattr(Processes, "started", lambda: Processes(0, 2, 0))
    placement = Placement.colocated(num_nodes=1, ranks_per_node=1, num_teachers=1)
    with pytest.raises(ConfigError, match=r"^cluster\.cpu_ranks=1: .* set cluster\.cpu_ranks=2$"):
        require_processes(Cluster(launcher="local", gpus_per_node=2), placement, "cpu")


def test_replicas_divide_data_parallel_ranks() -> None:
    assert resolve_layout("student.parallelism", 16, Parallelism(tp=2, replicas=4)) == Layout(dp=8, tp=2, replicas=4)
    assert resolve_layout("student.parallelism", 16, Parallelism(tp=4, cp=2)) == Layout(dp=2, cp=2, tp=4)
    with pytest.raises(
        ConfigError, match=r"^student.parallelism.replicas=3 does not divide the 8 .* write .*replicas=2,"
    ):
        resolve_layout("student.parallelism", 16, Parallelism(tp=2, replicas=3))


# Batch


@pytest.mark.parametrize(
    ("size", "student", "teachers"),
    [(12, 2, (4,)), (12, 1, (8, 3)), (30, 4, ()), (1, 4, ()), (5, 4, ()), (7, 4, ()), (60, 4, ())],
)
def test_a_batch_divides_into_the_ranks_of_every_group(
    demo: RunConfig, size: int, student: int, teachers: tuple[int, ...]
) -> None:
    """Bugs: the proposed batch size is refused too, or 0 for a batch smaller than the ranks."""

    def with_size(size: int) -> RunConfig:
        train = demo.train.model_copy(update={"global_batch_size": size})
        return demo.model_copy(update={"train": train})

    def divides(size: int) -> bool:
        return size % student == 0 and all(size % ranks == 0 for ranks in teachers)

    if divides(size):
        require_batch_divides(with_size(size), student, teachers)
        return
    with pytest.raises(ConfigError, match=f"^train.global_batch_size={size} is not a multiple of ") as caught:
        require_batch_divides(with_size(size), student, teachers)
    proposed = int(str(caught.value).partition("write train.global_batch_size=")[2].partition(",")[0])
    assert divides(proposed)
    require_batch_divides(with_size(proposed), student, teachers)
