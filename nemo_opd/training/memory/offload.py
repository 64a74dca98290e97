"""What moves to host memory between phases, where the settings leave that to the estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nemo_opd.config.run import RunConfig
from nemo_opd.errors import ConfigError
from nemo_opd.training.memory.advice import advice, gib
from nemo_opd.training.memory.estimate import MemoryEstimate
from nemo_opd.training.memory.situation import Situation, estimate

STUDENT = -1


def settle_memory(config: RunConfig, situation: Situation) -> tuple[RunConfig, MemoryEstimate]:
    """The settings with every `offload: auto` decided, and the estimate of them.

    The smallest set that fits: none, then teachers, the largest first, then the student's parameters and optimizer. On
    CPU, on devices of one's own and where nobody knows the GPU's memory: none. Raises ConfigError where nothing fits
    and there was something to decide, unless the run is a dry one; who has decided themselves is taken at their word.
    """
    chosen, made = config, estimate(config, situation)
    for chosen in choices(config, situation):
        made = estimate(chosen, situation)
        if made.fits:
            return chosen, made
    made = replace(made, advice=tuple(advice(chosen, situation)))
    if undecided(config) and situation.machine.device == "cuda" and not config.run.dry_run:
        raise ConfigError(complaint(made))
    return chosen, made


def choices(config: RunConfig, situation: Situation) -> Iterator[RunConfig]:
    """The settings with fewer and then more offloaded; all decided."""
    order = offload_order(config, situation)
    for number in range(len(order) + 1):
        yield with_offload(config, frozenset(order[:number]))


def offload_order(config: RunConfig, situation: Situation) -> list[int]:
    """Who can be offloaded and is not decided upon: indices of teachers, and STUDENT."""
    if situation.machine.device == "cpu" or config.cluster.placement == "separate":
        return []
    sizes = [setup.size.parameters for setup in situation.teachers]
    return sorted(undecided(config), key=lambda i: (i == STUDENT, 0 if i == STUDENT else -sizes[i]))


def undecided(config: RunConfig) -> list[int]:
    teachers = [i for i, teacher in enumerate(config.active_teachers) if teacher.offload == "auto"]
    return teachers + ([STUDENT] if config.student.offload == "auto" else [])


def with_offload(config: RunConfig, offloaded: frozenset[int]) -> RunConfig:
    """With `auto` as yes for these and as no for all others, also for teachers that are not active."""
    teachers = tuple(
        teacher.model_copy(update={"offload": i in offloaded}) if teacher.offload == "auto" else teacher
        for i, teacher in enumerate(config.teachers)
    )
    student = config.student
    if student.offload == "auto":
        student = student.model_copy(update={"offload": STUDENT in offloaded})
    return config.model_copy(update={"teachers": teachers, "student": student})


def complaint(made: MemoryEstimate) -> str:
    memory = made.shortest
    parts = sorted(memory.parts, key=lambda part: part.at(memory.peak_phase), reverse=True)[:3]
    largest = ", ".join(f"{part} {gib(part.at(memory.peak_phase))}" for part in parts)
    helps = "; ".join(f"{one.setting} saves {gib(one.saved_bytes)}" for one in made.advice)
    assert memory.capacity is not None
    return (
        f"student.offload=auto, teachers.*.offload=auto: with everything offloaded {memory.name} would have to hold "
        f"{gib(memory.peak)} in the phase {memory.peak_phase.value!r} ({largest}), and there are "
        f"{gib(memory.capacity)}; {helps or 'use more GPUs'}; or set every offload to true or false, which starts the "
        "run without this check. run.dry_run=true prints the whole estimate"
    )
