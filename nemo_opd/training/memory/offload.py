"""Decision which models to offload, and advice on settings that lower the estimate."""

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
from nemo_opd.training.memory.situation import MemoryInputs
from nemo_opd.training.sampling_batches import student_batch

_Model = TypeVar("_Model", Student, Teacher)
_STUDENT = -1
"""Stands for the student among indices of teachers."""
_SMALLEST_SAVING = 0.01
"""Smallest saving worth advising, as a share of the peak."""


def settle_memory(config: RunConfig, situation: MemoryInputs) -> tuple[RunConfig, MemoryEstimate]:
    """Return the settings with every `offload: auto` decided, and their estimate.

    Takes the smallest set that fits: none, then teachers, the largest first, then the student's parameters and
    optimizer. Small blocks of logits are tried before more is offloaded. On CPU, with separate devices and if the
    GPU's memory is unknown, nothing is offloaded. Raises ConfigError if nothing fits, an `auto` had to be decided and
    the run is not a dry run; explicit settings are not overruled.
    """
    undecided = [i for i, teacher in enumerate(config.active_teachers) if _is_undecided(teacher)]
    undecided.sort(key=lambda i: -situation.teachers[i].size.parameters)
    undecided += [_STUDENT] if _is_undecided(config.student) else []
    small_blocks = replace(situation, small_blocks=True)
    is_shared = situation.device == "cuda" and config.cluster.placement == "colocated"
    for number in range(1 + (len(undecided) if is_shared else 0)):
        decided = _decide_offload(config, frozenset(undecided[:number]))
        for inputs in (situation, small_blocks):
            estimated = estimate(decided, inputs)
            if estimated.fits:
                return decided, estimated
    estimated = replace(estimated, advice=tuple(advice(decided, small_blocks)))
    if undecided and situation.device == "cuda" and not config.run.dry_run:
        raise ConfigError(_does_not_fit(estimated, "with everything offloaded " if is_shared else ""))
    return decided, estimated


def _decide_offload(config: RunConfig, offloaded: frozenset[int]) -> RunConfig:
    """Set `offload: auto` to true for these models and to false for any other, also for inactive teachers."""

    def decide(model: _Model, index: int) -> _Model:
        return model.model_copy(update={"offload": index in offloaded}) if _is_undecided(model) else model

    teachers = tuple(decide(teacher, i) for i, teacher in enumerate(config.teachers))
    return config.model_copy(update={"teachers": teachers, "student": decide(config.student, _STUDENT)})


def _is_undecided(model: Student | Teacher) -> bool:
    """Return whether the model has weights and `offload: auto`."""
    has_weights = isinstance(model, Student) or (model.weights != "student" and model.is_computed)
    return model.offload == "auto" and has_weights


def _does_not_fit(estimated: MemoryEstimate, condition: str) -> str:
    """Return the error message: the peak, the capacity and settings that help."""
    memory = estimated.shortest
    remedies = [f"{change.setting} saves {gib(change.saved_bytes)}" for change in estimated.advice]
    if sum(change.saved_bytes for change in estimated.advice) < memory.shortage:
        remedies.append("use more GPUs")
    assert memory.capacity is not None
    return (
        f"student.offload=auto, teachers.*.offload=auto: {condition}{memory.name} would have to hold "
        f"{gib(memory.peak)} in the phase {memory.peak_phase.value!r} ({largest_parts(memory)}), but has "
        f"{gib(memory.capacity)}; {'; '.join(remedies)}; or set every offload to true or false, which starts the "
        "run without this check. run.dry_run=true prints the whole estimate"
    )


def advice(config: RunConfig, situation: MemoryInputs) -> list[Advice]:
    """Return single changes that lower the peak of the memory that is short, largest saving first."""
    short, changes = estimate(config, situation).shortest, []
    for setting, changed, inputs in variants(config, situation):
        peaks = {memory.name: memory.peak for memory in estimate(changed, inputs).memories}
        changes.append(Advice(setting, short.peak - peaks[short.name]))
    worthwhile = [change for change in changes if change.saved_bytes > _SMALLEST_SAVING * short.peak]
    return sorted(worthwhile, key=lambda change: change.saved_bytes, reverse=True)


def variants(config: RunConfig, situation: MemoryInputs) -> Iterator[tuple[str, RunConfig, MemoryInputs]]:
    """Yield single changes as `key=value`, each with the settings and the inputs of the estimate it leads to."""
    same_layouts = ((key, value, situation) for key, value in _changes(config, situation))
    for key, value, inputs in chain(same_layouts, _other_layouts(config, situation)):
        if (changed := _change(config, key, value)) not in (None, config):
            yield f"{key}={'null' if value is None else str(value).lower()}", changed, inputs


def _changes(config: RunConfig, situation: MemoryInputs) -> Iterator[tuple[str, object]]:
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
    # Each rank has the same number of sequences, and so has each prompt.
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


def _change(config: RunConfig, key: str, value: object) -> RunConfig | None:
    """Return the settings with another value of one key; None if a validation rule rejects it."""
    *path, name = key.split(".")
    section: Any = (settings := config.model_dump(exclude_unset=True))
    for part in path:
        section = section[int(part)] if isinstance(section, tuple) else section.setdefault(part, {})
    section[name] = value
    try:
        return from_dict(settings)
    except ConfigError:
        return None


def _other_layouts(config: RunConfig, situation: MemoryInputs) -> Iterator[tuple[str, object, MemoryInputs]]:
    """Yield `replicas=1` for each model, and twice its `tp` if that divides its ranks and the model."""
    for i, setup in enumerate((situation.student, *situation.teachers)):
        if i and not config.active_teachers[i - 1].has_model:
            continue
        layout, changed = setup.layout, {}
        if layout.replicas > 1:
            changed["replicas"] = replace(layout, replicas=1)
        if layout.dp // layout.replicas % 2 == 0 and setup.size.tensor_parts % (2 * layout.tp) == 0:
            changed["tp"] = replace(layout, dp=layout.dp // 2, tp=2 * layout.tp)
        for name, new_layout in changed.items():
            key = f"{f'teachers.{i - 1}' if i else 'student'}.parallelism.{name}"
            yield key, getattr(new_layout, name), situation.with_layouts({i: new_layout}, config)
