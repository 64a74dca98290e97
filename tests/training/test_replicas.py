"""Which models have a copy on every node, where the settings leave it to the estimate."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from nemo_opd.cluster.placement import Placement
from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.preflight.memory import SLACK, USABLE, Machine, MemoryInputs, ModelSetup, estimate
from nemo_opd.preflight.model_info import model_size
from nemo_opd.preflight.ranks import resolve_replicas
from tests.composition import compose

GIB = 2**30
NODES, GPUS = 2, 4
PLACEMENT = Placement.colocated(num_nodes=NODES, ranks_per_node=GPUS, num_teachers=2)


def configure(*overrides: str) -> RunConfig:
    return compose("train.global_batch_size=16", "train.micro_batch_size=1", *overrides)


@pytest.fixture(scope="module")
def situation() -> MemoryInputs:
    """A student and two teachers, the second of them larger, on GPUs that hold anything."""
    sizes = [
        model_size(LlamaConfig(vocab_size=1000, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4))
        for width in (1024, 1024, 2048)
    ]
    setups = [ModelSetup(size, size.vocab_size, Layout(NODES * GPUS)) for size in sizes]
    return MemoryInputs(setups[0], tuple(setups[1:]), Machine("cuda", 80 * GIB, None, GPUS))


def copies(
    config: RunConfig, situation: MemoryInputs, placement: Placement = PLACEMENT
) -> tuple[list[object], list[int]]:
    """Return the number of copies of each model in the settings, and in the layouts."""
    settled, resolved = resolve_replicas(config, situation, placement)
    models = (settled.student, *settled.teachers)
    setups = (resolved.student, *resolved.teachers)
    return [model.parallelism.replicas for model in models], [setup.layout.replicas for setup in setups]


def with_copies(situation: MemoryInputs, *numbers: int) -> MemoryInputs:
    student, *teachers = (
        replace(setup, layout=replace(setup.layout, replicas=number))
        for setup, number in zip((situation.student, *situation.teachers), numbers, strict=True)
    )
    return replace(situation, student=student, teachers=tuple(teachers))


def on(situation: MemoryInputs, device_bytes: float) -> MemoryInputs:
    return replace(situation, machine=replace(situation.machine, device_bytes=int(device_bytes)))


def test_models_have_a_copy_on_every_node_if_all_fit(situation: MemoryInputs) -> None:
    """Bugs: a run that fits is made one that does not, or one that is offloaded; layouts other than the settings'."""
    config = configure()
    peak = estimate(config, with_copies(situation, 2, 2, 2)).memories[0].peak
    assert copies(config, on(situation, SLACK * peak / USABLE + 1)) == ([2, 2, 2], [2, 2, 2])
    assert copies(config, on(situation, SLACK * peak / USABLE - 100)) == ([1, 1, 1], [1, 1, 1])


def test_a_model_whose_copy_fills_half_of_a_gpu_has_none(situation: MemoryInputs) -> None:
    """Bug: weights of a small student are gathered between nodes because a large teacher has no room for a copy."""
    size = model_size(LlamaConfig(vocab_size=1000, hidden_size=4096, intermediate_size=16384, num_hidden_layers=24))
    large = replace(situation, teachers=(situation.teachers[0], replace(situation.teachers[1], size=size)))
    copy = 4 * size.parameters / GPUS  # fp32 by the demo's settings
    assert copies(configure(), on(large, 2 * copy - 1e6)) == ([2, 2, 1], [2, 2, 1])
    assert copies(configure(), on(large, 3 * copy)) == ([2, 2, 2], [2, 2, 2])


@pytest.mark.parametrize(
    "machine", [Machine("cuda", None, None, GPUS), Machine("cpu", None, None, GPUS), Machine("cuda", GIB // 8, None, 4)]
)
def test_one_copy_where_it_is_unknown_whether_more_fit(situation: MemoryInputs, machine: Machine) -> None:
    assert copies(configure(), replace(situation, machine=machine)) == ([1, 1, 1], [1, 1, 1])


def test_what_was_asked_for_stays(situation: MemoryInputs) -> None:
    config = configure("+student.parallelism.replicas=8", "+teachers.1.parallelism.replicas=1")
    assert copies(config, with_copies(situation, 8, 1, 1)) == ([8, 2, 1], [8, 2, 1])


def test_a_copy_is_on_one_node(situation: MemoryInputs) -> None:
    """Bug: two copies of a model whose ranks are on nodes in other numbers, so that each would be on both."""
    one = Placement.colocated(num_nodes=1, ranks_per_node=NODES * GPUS, num_teachers=2)
    assert copies(configure(), situation, one) == ([1, 1, 1], [1, 1, 1])
    uneven = Placement(PLACEMENT.student, (PLACEMENT.student[2:], PLACEMENT.student[4:]))
    few, fewer = (replace(setup, layout=Layout(n)) for setup, n in zip(situation.teachers, (6, 4), strict=True))
    assert copies(configure(), replace(situation, teachers=(few, fewer)), uneven) == ([2, 1, 1], [2, 1, 1])
    tensor = replace(situation, student=replace(situation.student, layout=Layout(1, tp=8)))
    assert copies(configure("student.parallelism.tp=8"), tensor) == ([1, 2, 2], [1, 2, 2])
