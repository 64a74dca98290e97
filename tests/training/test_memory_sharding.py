"""Replicas, gathered weights and one gradient reduction per step, chosen by the memory estimate."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from nemo_opd.cluster.placement import Placement
from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.preflight.memory import SLACK, USABLE, Machine, MemoryInputs, ModelSetup, estimate
from nemo_opd.preflight.memory_choices import settle_memory
from nemo_opd.preflight.model_info import ModelSize, model_size
from nemo_opd.preflight.ranks import resolve_replicas
from tests.composition import compose

GIB = 2**30
NODES, GPUS = 2, 4
PLACEMENT = Placement.colocated(num_nodes=NODES, ranks_per_node=GPUS, num_teachers=2)
MODELS = ["teachers.0", "teachers.1", "student"]
ONCE = "student.sync_each_micro_batch"


def key(model: str) -> str:
    return f"{model}.parallelism.reshard_after_forward"


def configure(*overrides: str) -> RunConfig:
    settings = (f"++{override}" for override in overrides)
    return compose("train.global_batch_size=16", "train.micro_batch_size=1", *settings)


def size_of(width: int, num_layers: int) -> ModelSize:
    shape = {"hidden_size": width, "intermediate_size": 4 * width, "num_hidden_layers": num_layers}
    return model_size(LlamaConfig(vocab_size=1000, **shape))


@pytest.fixture(scope="module")
def inputs() -> MemoryInputs:
    """Inputs for a student and two teachers, the first of them larger, on GPUs that hold anything."""
    student, *teachers = (
        ModelSetup(size, size.vocab_size, Layout(NODES * GPUS))
        for size in (size_of(1024, 4), size_of(2048, 4), size_of(1024, 4))
    )
    return MemoryInputs(student, tuple(teachers), Machine("cuda", 80 * GIB, None, GPUS))


@pytest.fixture(scope="module")
def with_large_teacher(inputs: MemoryInputs) -> MemoryInputs:
    return replace(inputs, teachers=(replace(inputs.teachers[0], size=size_of(4096, 24)), inputs.teachers[1]))


def on(inputs: MemoryInputs, device_bytes: float) -> MemoryInputs:
    return replace(inputs, machine=replace(inputs.machine, device_bytes=int(device_bytes)))


def copies(config: RunConfig, inputs: MemoryInputs, placement: Placement = PLACEMENT) -> tuple[list[object], list[int]]:
    """Return the number of copies of student and teachers in the settings, and in the layouts."""
    settled, resolved = resolve_replicas(config, inputs, placement)
    models = (settled.student, *settled.teachers)
    setups = (resolved.student, *resolved.teachers)
    return [model.parallelism.replicas for model in models], [setup.layout.replicas for setup in setups]


def with_copies(inputs: MemoryInputs, *numbers: int) -> MemoryInputs:
    student, *teachers = (
        replace(setup, layout=replace(setup.layout, replicas=number))
        for setup, number in zip((inputs.student, *inputs.teachers), numbers, strict=True)
    )
    return replace(inputs, student=student, teachers=tuple(teachers))


def gathered(config: RunConfig, inputs: MemoryInputs) -> list[str]:
    """Return the models whose weights stay gathered, and ONCE if gradients are reduced once per step."""
    settled, _ = settle_memory(config, inputs)
    models = dict(zip(MODELS, (*settled.teachers, settled.student), strict=True))
    values = {name: model.parallelism.reshard_after_forward for name, model in models.items()}
    values[ONCE] = settled.student.sync_each_micro_batch
    assert all(isinstance(value, bool) for value in values.values())
    return [name for name, value in values.items() if value is False]


def test_models_have_a_copy_on_every_node_if_all_fit(inputs: MemoryInputs) -> None:
    """Bugs: copies that make a run too large or offload it; layouts with other copies than the settings."""
    config = configure()
    peak = estimate(config, with_copies(inputs, 2, 2, 2)).memories[0].peak
    assert copies(config, on(inputs, SLACK * peak / USABLE + 1)) == ([2, 2, 2], [2, 2, 2])
    assert copies(config, on(inputs, SLACK * peak / USABLE - 100)) == ([1, 1, 1], [1, 1, 1])
    assert copies(config, on(inputs, GIB // 8)) == ([1, 1, 1], [1, 1, 1])


def test_a_model_whose_copy_fills_half_of_a_gpu_has_none(with_large_teacher: MemoryInputs) -> None:
    """Bug: weights of a small student are gathered between nodes because a large teacher has no room for a copy."""
    copy = 4 * with_large_teacher.teachers[0].size.parameters / GPUS  # fp32 by the demo's settings
    assert copies(configure(), on(with_large_teacher, 2 * copy - 1e6)) == ([2, 1, 2], [2, 1, 2])
    assert copies(configure(), on(with_large_teacher, 3 * copy)) == ([2, 2, 2], [2, 2, 2])


def test_a_copy_is_on_one_node(inputs: MemoryInputs) -> None:
    """Bug: a model with different numbers of ranks on two nodes has two copies, each over both nodes."""
    one = Placement.colocated(num_nodes=1, ranks_per_node=NODES * GPUS, num_teachers=2)
    assert copies(configure(), inputs, one) == ([1, 1, 1], [1, 1, 1])
    uneven = Placement(PLACEMENT.student, (PLACEMENT.student[2:], PLACEMENT.student[4:]))
    six, four = (replace(setup, layout=Layout(n)) for setup, n in zip(inputs.teachers, (6, 4), strict=True))
    assert copies(configure(), replace(inputs, teachers=(six, four)), uneven) == ([2, 1, 1], [2, 1, 1])
    tensor = replace(inputs, student=replace(inputs.student, layout=Layout(1, tp=8)))
    assert copies(configure("student.parallelism.tp=8"), tensor) == ([1, 2, 2], [1, 2, 2])


def test_weights_stay_gathered_if_they_fit_easily(inputs: MemoryInputs) -> None:
    """Bug: gathered weights make a run too large or offload it."""
    weights = [f"{key(model)}=false" for model in MODELS]
    for overrides, expected in (((*weights, f"{ONCE}=false"), [*MODELS, ONCE]), (weights, MODELS)):
        peak = estimate(configure(*overrides), inputs).memories[0].peak
        assert gathered(configure(), on(inputs, SLACK * peak / USABLE + 1)) == expected


def test_nothing_stays_gathered_without_room(inputs: MemoryInputs) -> None:
    """Bug: the last byte of a GPU is spent on saving time."""
    peak = estimate(configure(), inputs).memories[0].peak
    tight = on(inputs, peak / USABLE + 1)
    assert estimate(configure(), tight).fits()
    assert gathered(configure(), tight) == []


def test_a_model_whose_weights_fill_a_quarter_of_a_gpu_does_not_stay_gathered(with_large_teacher: MemoryInputs) -> None:
    """Bug: a small student is gathered again for every microbatch because of a large teacher."""
    weights = 4 * with_large_teacher.teachers[0].size.parameters  # fp32 by the demo's settings
    assert gathered(configure(), on(with_large_teacher, 4 * weights - 4)) == ["teachers.1", "student", ONCE]
    assert gathered(configure(), on(with_large_teacher, 4 * weights + 4)) == [*MODELS, ONCE]


@pytest.mark.parametrize("machine", [Machine("cpu", None, 80 * GIB, GPUS), Machine("cuda", None, None, GPUS)])
def test_models_are_sharded_on_a_cpu_or_in_unknown_memory(inputs: MemoryInputs, machine: Machine) -> None:
    assert copies(configure(), replace(inputs, machine=machine)) == ([1, 1, 1], [1, 1, 1])
    assert gathered(configure(), replace(inputs, machine=machine)) == []


def test_explicit_settings_stay(inputs: MemoryInputs) -> None:
    """Bugs: a setting is overruled; weights that are offloaded after each use stay gathered on the device."""
    config = configure("student.parallelism.replicas=8", "teachers.1.parallelism.replicas=1")
    assert copies(config, with_copies(inputs, 8, 1, 1)) == ([8, 2, 1], [8, 2, 1])
    assert gathered(configure(), inputs) == [*MODELS, ONCE]
    assert gathered(configure("teachers.0.offload=true", f"{key('teachers.1')}=true"), inputs) == ["student", ONCE]
    assert gathered(configure(f"{ONCE}=true"), inputs) == MODELS
