"""Settings that would make a run smaller, and by how much."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from nemo_opd.config.handoff import HiddenStatesHandoff
from nemo_opd.config.on_policy import check_on_policy
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.estimate import estimate
from nemo_opd.training.memory.parts import Advice
from nemo_opd.training.memory.sampling import rollouts
from nemo_opd.training.memory.situation import Situation
from nemo_opd.training.memory.teacher import are_asked

_WORTH_SAYING = 0.01
"""Share of the peak."""


def advice(config: RunConfig, situation: Situation) -> list[Advice]:
    """Return changes that lower the peak of the memory that is short, each alone, largest saving first."""
    short = estimate(config, situation).shortest
    found = []
    for setting, changed, around in variants(config, situation):
        peaks = {memory.name: memory.peak for memory in estimate(changed, around).memories}
        found.append(Advice(setting, short.peak - peaks[short.name]))
    worth = [one for one in found if one.saved_bytes > _WORTH_SAYING * short.peak]
    return sorted(worth, key=lambda one: one.saved_bytes, reverse=True)


def variants(config: RunConfig, situation: Situation) -> Iterator[tuple[str, RunConfig, Situation]]:
    """Yield settings to write, and the run with each."""
    for section, key, value in _changes(config, situation):
        name, _, index = section.partition(".")
        changed = getattr(config, name)
        if index:
            teachers = [*changed]
            teachers[int(index)] = teachers[int(index)].model_copy(update={key: value})
            changed = tuple(teachers)
        else:
            changed = changed.model_copy(update={key: value})
        run = config.model_copy(update={name: changed})
        if _is_allowed(run):
            yield f"{section}.{key}={'null' if value is None else str(value).lower()}", run, situation
    if config.handoff.type == "logits":
        yield "handoff.type=hidden_states", config.model_copy(update={"handoff": HiddenStatesHandoff()}), situation
    yield from _more_tensor_parallel(config, situation)


def _changes(config: RunConfig, situation: Situation) -> Iterator[tuple[str, str, object]]:
    """Yield sections, keys and values; some may be refused."""
    train, rollout, questions = config.train, config.rollout, config.evaluation
    if not config.student.activation_checkpointing:
        yield "student", "activation_checkpointing", True
    if train.micro_batch_size > 1:
        yield "train", "micro_batch_size", train.micro_batch_size // 2
    yield "train", "global_batch_size", max(1, train.global_batch_size // 2)
    yield "train", "max_length", max(2, train.max_length // 2)
    if config.logging.gradients_every is not None:
        yield "logging", "gradients_every", None
    if isinstance(rollout, HFRollout) and (rows := rollouts(config, situation.student.layout.dp).rows) > 1:
        yield "rollout", "batch_size", rows // 2
    if questions is not None and are_asked(config):
        if questions.teacher_batch_size > 1:
            yield "evaluation", "teacher_batch_size", questions.teacher_batch_size // 2
        yield "evaluation", "teachers", False
    if situation.machine.device == "cpu":
        return
    if config.student.offload is not True:
        yield "student", "offload", True
    for i, teacher in enumerate(config.active_teachers):
        if teacher.offload is not True:
            yield f"teachers.{i}", "offload", True
        if teacher.dtype == "float32":
            yield f"teachers.{i}", "dtype", "bfloat16"


def _is_allowed(config: RunConfig) -> bool:
    """Return whether the settings would pass; copies are not validated."""
    try:
        if config.rollout is not None:
            check_on_policy(config)
    except ValueError:
        return False
    return True


def _more_tensor_parallel(config: RunConfig, situation: Situation) -> Iterator[tuple[str, RunConfig, Situation]]:
    """Yield twice the tensor parallelism in place of data parallelism, where there are ranks for it."""
    models = [situation.student, *situation.teachers]
    for i, setup in enumerate(models):
        layout = setup.layout
        if layout.dp % 2 or (i == 0 and config.student.lora is not None):
            continue
        wider = replace(setup, layout=replace(layout, dp=layout.dp // 2, tp=2 * layout.tp))
        student, *teachers = (wider if j == i else each for j, each in enumerate(models))
        changed = replace(situation, student=student, teachers=tuple(teachers))
        key = f"teachers.{i - 1}" if i else "student"
        yield f"{key}.parallelism.tp={2 * layout.tp}", config, changed
