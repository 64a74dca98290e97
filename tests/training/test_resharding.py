"""Which weights stay gathered, and whether gradients are reduced once a step, by the estimate."""

from dataclasses import replace

import pytest
from transformers import LlamaConfig

from nemo_opd.config import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.preflight.memory import estimate, resolve_resharding
from nemo_opd.preflight.memory import SLACK, USABLE, Machine, MemoryInputs, ModelSetup
from nemo_opd.preflight.model_info import model_size
from tests.composition import compose

GIB = 2**30
WEIGHTS = [f"{model}.parallelism.reshard_after_forward" for model in ("teachers.1", "teachers.0", "student")]
"""In the order in which they are tried: the second teacher is the smaller one."""
IN_ORDER = [*WEIGHTS, "student.sync_each_micro_batch"]


def configure(*overrides: str) -> RunConfig:
    return compose("train.global_batch_size=16", "train.micro_batch_size=1", *(f"+{each}" for each in overrides))


@pytest.fixture(scope="module")
def situation() -> MemoryInputs:
    sizes = [
        model_size(LlamaConfig(vocab_size=1000, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=4))
        for width in (1024, 2048, 1024)
    ]
    setups = [ModelSetup(size, size.vocab_size, Layout(4)) for size in sizes]
    return MemoryInputs(setups[0], tuple(setups[1:]), Machine("cuda", 80 * GIB, None, 4))


def kept(config: RunConfig, situation: MemoryInputs) -> list[str]:
    """Return which of the settings are false, in the order of `IN_ORDER`."""
    found = resolve_resharding(config, situation)
    models = found.teachers[1], found.teachers[0], found.student
    values = [*(model.parallelism.reshard_after_forward for model in models), found.student.sync_each_micro_batch]
    assert all(isinstance(value, bool) for value in values)
    return [name for name, value in zip(IN_ORDER, values, strict=True) if value is False]


def test_as_much_is_kept_as_fits_easily(situation: MemoryInputs) -> None:
    """Bugs: a run that fits is made one that does not, or one that is offloaded."""
    for number in range(len(IN_ORDER) + 1):
        wanted = IN_ORDER[:number]
        peak = estimate(configure(*(f"{name}=false" for name in wanted)), situation).memories[0].peak
        machine = replace(situation.machine, device_bytes=int(SLACK * peak / USABLE) + 1)
        tight = replace(situation, machine=machine)
        found = kept(configure(), tight)
        assert found[:number] == wanted
        # What follows is kept only where it is alive at another time than the peak.
        more = estimate(configure(*(f"{name}=false" for name in found)), tight)
        assert more.fits_easily


def test_nothing_is_kept_without_room(situation: MemoryInputs) -> None:
    """Bug: the last byte of a GPU is spent on what saves time."""
    peak = estimate(configure(), situation).memories[0].peak
    machine = replace(situation.machine, device_bytes=int(peak / USABLE) + 1)
    assert estimate(configure(), replace(situation, machine=machine)).fits
    assert kept(configure(), replace(situation, machine=machine)) == []


@pytest.mark.parametrize("machine", [Machine("cpu", None, 80 * GIB, 1), Machine("cuda", None, None, 4)])
def test_nothing_is_kept_on_a_cpu_or_in_an_unknown_memory(situation: MemoryInputs, machine: Machine) -> None:
    assert kept(configure(), replace(situation, machine=machine)) == []


def test_settings_are_not_overruled(situation: MemoryInputs) -> None:
    """Nor is what leaves the device after each use kept on it."""
    assert kept(configure(), situation) == IN_ORDER
    assert kept(configure("teachers.0.offload=true", f"{WEIGHTS[0]}=true"), situation) == IN_ORDER[2:]
    assert kept(configure("student.sync_each_micro_batch=true"), situation) == WEIGHTS
