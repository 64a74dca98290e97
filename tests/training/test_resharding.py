"""Which weights stay gathered, and whether gradients are reduced once a step, by the estimate."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.preflight.memory import SLACK, USABLE, Machine, MemoryInputs, ModelSetup, estimate
from nemo_opd.preflight.memory_choices import settle_memory
from nemo_opd.preflight.model_info import model_size
from tests.composition import compose

GIB = 2**30
GATHERED = ["teachers.0", "teachers.1", "student"]
ONCE = "student.sync_each_micro_batch"


def key(model: str) -> str:
    return f"{model}.parallelism.reshard_after_forward"


def configure(*overrides: str) -> RunConfig:
    return compose(
        "train.global_batch_size=16", "train.micro_batch_size=1", *(f"+{override}" for override in overrides)
    )


@pytest.fixture(scope="module")
def situation() -> MemoryInputs:
    sizes = [
        model_size(LlamaConfig(vocab_size=1000, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4))
        for width in (1024, 2048, 1024)
    ]
    setups = [ModelSetup(size, size.vocab_size, Layout(4)) for size in sizes]
    return MemoryInputs(setups[0], tuple(setups[1:]), Machine("cuda", 80 * GIB, None, 4))


def on(situation: MemoryInputs, device_bytes: float) -> MemoryInputs:
    return replace(situation, machine=replace(situation.machine, device_bytes=int(device_bytes)))


def gathered(config: RunConfig, situation: MemoryInputs) -> list[str]:
    """Return the models whose weights stay gathered, and the gradients' setting if they are reduced once a step."""
    settled, _ = settle_memory(config, situation)
    models = dict(zip(GATHERED, (*settled.teachers, settled.student), strict=True))
    values = {name: model.parallelism.reshard_after_forward for name, model in models.items()}
    values[ONCE] = settled.student.sync_each_micro_batch
    assert all(isinstance(value, bool) for value in values.values())
    return [name for name, value in values.items() if value is False]


def test_as_much_is_kept_as_fits_easily(situation: MemoryInputs) -> None:
    """Bugs: a run that fits is made one that does not, or one that is offloaded."""
    weights = [f"{key(model)}=false" for model in GATHERED]
    for overrides, expected in (((*weights, f"{ONCE}=false"), [*GATHERED, ONCE]), (weights, GATHERED)):
        peak = estimate(configure(*overrides), situation).memories[0].peak
        assert gathered(configure(), on(situation, SLACK * peak / USABLE + 1)) == expected


def test_nothing_is_kept_without_room(situation: MemoryInputs) -> None:
    """Bug: the last byte of a GPU is spent on what saves time."""
    peak = estimate(configure(), situation).memories[0].peak
    tight = on(situation, peak / USABLE + 1)
    assert estimate(configure(), tight).fits()
    assert gathered(configure(), tight) == []


def test_a_model_whose_weights_fill_a_quarter_of_a_gpu_does_not_hinder_the_others(situation: MemoryInputs) -> None:
    """Bug: a small student is gathered again for every microbatch because of a large teacher."""
    size = model_size(LlamaConfig(vocab_size=1000, hidden_size=4096, intermediate_size=16384, num_hidden_layers=24))
    large = replace(situation, teachers=(replace(situation.teachers[0], size=size), situation.teachers[1]))
    weights = 4 * size.parameters  # fp32 by the demo's settings
    assert gathered(configure(), on(large, 4 * weights - 4)) == ["teachers.1", "student", ONCE]
    assert gathered(configure(), on(large, 4 * weights + 4)) == [*GATHERED, ONCE]


@pytest.mark.parametrize("machine", [Machine("cpu", None, 80 * GIB, 1), Machine("cuda", None, None, 4)])
def test_nothing_is_kept_on_a_cpu_or_in_an_unknown_memory(situation: MemoryInputs, machine: Machine) -> None:
    assert gathered(configure(), replace(situation, machine=machine)) == []


def test_settings_are_not_overruled(situation: MemoryInputs) -> None:
    """Nor is what leaves the device after each use kept on it."""
    assert gathered(configure(), situation) == [*GATHERED, ONCE]
    assert gathered(configure("teachers.0.offload=true", f"{key('teachers.1')}=true"), situation) == ["student", ONCE]
    assert gathered(configure(f"{ONCE}=true"), situation) == GATHERED
