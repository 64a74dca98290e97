"""What moves to host memory between phases, where the settings leave that to the estimate."""

from __future__ import annotations

from dataclasses import replace

from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError
from nemo_opd.training.memory.advice import advice
from nemo_opd.training.memory.estimate import estimate
from nemo_opd.training.memory.parts import MemoryEstimate
from nemo_opd.training.memory.report import gib, largest_parts
from nemo_opd.training.memory.situation import Situation

_STUDENT = -1
"""In place of a teacher's index."""


def settle_memory(config: RunConfig, situation: Situation) -> tuple[RunConfig, MemoryEstimate]:
    """Return the settings with every `offload: auto` decided, and their estimate.

    The smallest set that fits: none, then teachers, the largest first, then the student's parameters and optimizer. On
    CPU, with separate devices and where the GPU's memory is unknown: none. Raises ConfigError where nothing fits and
    an `auto` was left to decide, unless the run is a dry one; explicit settings are not overruled.
    """
    undecided = [i for i, teacher in enumerate(config.active_teachers) if teacher.offload == "auto"]
    undecided.sort(key=lambda i: -situation.teachers[i].size.parameters)
    undecided += [_STUDENT] if config.student.offload == "auto" else []
    is_shared = situation.machine.device == "cuda" and config.cluster.placement == "colocated"
    for number in range(1 + (len(undecided) if is_shared else 0)):
        chosen = _with_offload(config, frozenset(undecided[:number]))
        made = estimate(chosen, situation)
        if made.fits:
            return chosen, made
    made = replace(made, advice=tuple(advice(chosen, situation)))
    if undecided and situation.machine.device == "cuda" and not config.run.dry_run:
        raise ConfigError(_complaint(made))
    return chosen, made


def _with_offload(config: RunConfig, offloaded: frozenset[int]) -> RunConfig:
    """Decide `auto`: yes for these models and no for all others, including teachers that are not active."""
    teachers = tuple(
        teacher.model_copy(update={"offload": i in offloaded}) if teacher.offload == "auto" else teacher
        for i, teacher in enumerate(config.teachers)
    )
    student = config.student
    if student.offload == "auto":
        student = student.model_copy(update={"offload": _STUDENT in offloaded})
    return config.model_copy(update={"teachers": teachers, "student": student})


def _complaint(made: MemoryEstimate) -> str:
    memory = made.shortest
    helps = "; ".join(f"{one.setting} saves {gib(one.saved_bytes)}" for one in made.advice)
    assert memory.capacity is not None
    return (
        f"student.offload=auto, teachers.*.offload=auto: with everything offloaded {memory.name} would have to hold "
        f"{gib(memory.peak)} in the phase {memory.peak_phase.value!r} ({largest_parts(memory)}), and there are "
        f"{gib(memory.capacity)}; {helps or 'use more GPUs'}; or set every offload to true or false, which starts the "
        "run without this check. run.dry_run=true prints the whole estimate"
    )
