"""Models that are offloaded because of the estimate, and settings that would lower it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from math import lcm
from typing import Any, TypeVar

from nemo_opd.config.load import from_dict
from nemo_opd.config.model import Student
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.errors import ConfigError
from nemo_opd.training.memory.estimate import estimate
from nemo_opd.training.memory.parts import Advice, MemoryEstimate
from nemo_opd.training.memory.report import gib, largest_parts
from nemo_opd.training.memory.situation import Situation
from nemo_opd.training.sampling_batches import student_batch

_Model = TypeVar("_Model", Student, Teacher)
_STUDENT = -1
"""Index of the student among the teachers' indices."""
_SMALLEST_SAVING = 0.01
"""Smallest saving that is advised, as a share of the peak."""


def settle_memory(config: RunConfig, situation: Situation) -> tuple[RunConfig, MemoryEstimate]:
    """Return the settings with every `offload: auto` decided, and their estimate.

    The smallest set that fits: none, then teachers, the largest first, then the student's parameters and optimizer. On
    CPU, with separate devices and where the GPU's memory is unknown: none. Small blocks of logits come before anything
    is offloaded. Raises ConfigError where nothing fits and an `auto` was left to decide, unless the run is a dry one;
    explicit settings are not overruled.
    """
    undecided = [i for i, teacher in enumerate(config.active_teachers) if _may_leave(teacher)]
    undecided.sort(key=lambda i: -situation.teachers[i].size.parameters)
    undecided += [_STUDENT] if _may_leave(config.student) else []
    frugal = replace(situation, small_blocks=True)
    is_shared = situation.device == "cuda" and config.cluster.placement == "colocated"
    for number in range(1 + (len(undecided) if is_shared else 0)):
        chosen = _with_offload(config, frozenset(undecided[:number]))
        for around in (situation, frugal):
            estimated = estimate(chosen, around)
            if estimated.fits:
                return chosen, estimated
    estimated = replace(estimated, advice=tuple(advice(chosen, frugal)))
    if undecided and situation.device == "cuda" and not config.run.dry_run:
        raise ConfigError(_complaint(estimated, "with everything offloaded " if is_shared else ""))
    return chosen, estimated


def _with_offload(config: RunConfig, offloaded: frozenset[int]) -> RunConfig:
    """Decide `auto`: yes for these models and no for all others, including teachers that are not active."""

    def decided(model: _Model, index: int) -> _Model:
        return model.model_copy(update={"offload": index in offloaded}) if _may_leave(model) else model

    teachers = tuple(decided(teacher, i) for i, teacher in enumerate(config.teachers))
    return config.model_copy(update={"teachers": teachers, "student": decided(config.student, _STUDENT)})


def _may_leave(model: Student | Teacher) -> bool:
    """Return whether the estimate decides if a model's weights leave the device, where it has weights."""
    has_weights = isinstance(model, Student) or (model.weights != "student" and model.is_computed)
    return model.offload == "auto" and has_weights


def _complaint(estimated: MemoryEstimate, condition: str) -> str:
    memory = estimated.shortest
    helps = [f"{each.setting} saves {gib(each.saved_bytes)}" for each in estimated.advice]
    if sum(each.saved_bytes for each in estimated.advice) < memory.shortage:
        helps.append("use more GPUs")
    assert memory.capacity is not None
    return (
        f"student.offload=auto, teachers.*.offload=auto: {condition}{memory.name} would have to hold "
        f"{gib(memory.peak)} in the phase {memory.peak_phase.value!r} ({largest_parts(memory)}), and there are "
        f"{gib(memory.capacity)}; {'; '.join(helps)}; or set every offload to true or false, which starts the "
        "run without this check. run.dry_run=true prints the whole estimate"
    )


def advice(config: RunConfig, situation: Situation) -> list[Advice]:
    """Return changes that lower the peak of the memory that is short, each alone, largest saving first."""
    short, found = estimate(config, situation).shortest, []
    for setting, changed, around in variants(config, situation):
        peaks = {memory.name: memory.peak for memory in estimate(changed, around).memories}
        found.append(Advice(setting, short.peak - peaks[short.name]))
    worth = [each for each in found if each.saved_bytes > _SMALLEST_SAVING * short.peak]
    return sorted(worth, key=lambda each: each.saved_bytes, reverse=True)


def variants(config: RunConfig, situation: Situation) -> Iterator[tuple[str, RunConfig, Situation]]:
    """Yield settings to write, and the run with each."""
    alone = ((key, value, situation) for key, value in _changes(config, situation))
    for key, value, around in chain(alone, _other_layouts(config, situation)):
        if (run := _changed(config, key, value)) not in (None, config):
            yield f"{key}={'null' if value is None else str(value).lower()}", run, around


def _changes(config: RunConfig, situation: Situation) -> Iterator[tuple[str, object]]:
    train, rollout, evaluation = config.train, config.rollout, config.evaluation
    yield "student.sync_each_micro_batch", True
    yield "student.activation_checkpointing", True
    yield "student.offload", True
    yield "train.async_save", False
    yield "handoff.type", "hidden_states"
    yield "logging.gradients_every", None
    if train.micro_batch_tokens is None:
        yield "train.micro_batch_size", max(1, train.micro_batch_size // 2)
    else:
        yield "train.micro_batch_tokens", max(2, train.micro_batch_tokens // 2)
    yield "train.max_length", max(2, train.max_length // 2)
    # Ranks and prompts have the same number of sequences each.
    ranks = (setup.layout.dp for setup in (situation.student, *situation.teachers))
    unit = lcm(*ranks, 1 if rollout is None else rollout.n)
    yield "train.global_batch_size", max(unit, train.global_batch_size // 2 // unit * unit)
    if isinstance(rollout, HFRollout):
        yield "rollout.batch_size", max(1, student_batch(config, situation.student.layout.dp).rows // 2)
    if evaluation is not None:
        yield "evaluation.batch_size", max(1, evaluation.batch_size // 2)
        yield "evaluation.teacher_batch_size", max(1, evaluation.teacher_batch_size // 2)
        yield "evaluation.teachers", False
    for i in range(len(config.active_teachers)):
        yield f"teachers.{i}.offload", True
        yield f"teachers.{i}.offload", "layers"
        yield f"teachers.{i}.dtype", "bfloat16"


def _changed(config: RunConfig, key: str, value: object) -> RunConfig | None:
    """Return the settings with another value; None where a rule refuses it."""
    *path, name = key.split(".")
    found: Any = (settings := config.model_dump(exclude_unset=True))
    for each in path:
        found = found[int(each)] if isinstance(found, tuple) else found.setdefault(each, {})
    found[name] = value
    try:
        return from_dict(settings)
    except ConfigError:
        return None


def _other_layouts(config: RunConfig, situation: Situation) -> Iterator[tuple[str, object, Situation]]:
    """Yield a single copy of each model, and twice its tensor parallelism where ranks and the model divide into it."""
    for i, setup in enumerate((situation.student, *situation.teachers)):
        if i and not config.active_teachers[i - 1].has_model:
            continue
        layout, found = setup.layout, {}
        if layout.replicas > 1:
            found["replicas"] = replace(layout, replicas=1)
        if layout.dp // layout.replicas % 2 == 0 and setup.size.tensor_parts % (2 * layout.tp) == 0:
            found["tp"] = replace(layout, dp=layout.dp // 2, tp=2 * layout.tp)
        for name, other in found.items():
            key = f"{f'teachers.{i - 1}' if i else 'student'}.parallelism.{name}"
            yield key, getattr(other, name), situation.with_layouts({i: other}, config)
