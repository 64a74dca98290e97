"""Settings that would make a run smaller, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from nemo_opd.config.handoff import HiddenStatesHandoff
from nemo_opd.config.on_policy import check_on_policy
from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.answers import are_asked
from nemo_opd.training.memory.estimate import Advice
from nemo_opd.training.memory.process import ModelSetup
from nemo_opd.training.memory.rollout import rollouts
from nemo_opd.training.memory.situation import Situation, estimate

WORTH_SAYING = 0.01
"""Share of the peak."""

Variant = tuple[str, RunConfig, Situation]


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def advice(config: RunConfig, situation: Situation) -> list[Advice]:
    """Changes that lower the peak of the memory that is short, each on its own, best first."""
    short = estimate(config, situation).shortest
    found = []
    for setting, changed, around in variants(config, situation):
        peaks = {memory.name: memory.peak for memory in estimate(changed, around).memories}
        found.append(Advice(setting, short.peak - peaks[short.name]))
    worth = [one for one in found if one.saved_bytes > WORTH_SAYING * short.peak]
    return sorted(worth, key=lambda one: one.saved_bytes, reverse=True)


def variants(config: RunConfig, situation: Situation) -> Iterator[Variant]:
    """What one can write, and what it makes of the run."""
    found = (
        *of_training(config),
        *of_rollouts(config, situation),
        *of_answers(config),
        *of_placement(config, situation),
    )
    for setting, changed in found:
        if is_allowed(changed):
            yield setting, changed, situation
    yield from of_parallelism(config, situation)


def of_training(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    train, student = config.train, config.student
    if not student.activation_checkpointing:
        changed = student.model_copy(update={"activation_checkpointing": True})
        yield "student.activation_checkpointing=true", config.model_copy(update={"student": changed})
    if train.micro_batch_size > 1:
        yield with_train(config, "micro_batch_size", train.micro_batch_size // 2)
    yield with_train(config, "global_batch_size", max(1, train.global_batch_size // 2))
    yield with_train(config, "max_length", max(2, train.max_length // 2))
    if config.handoff.type == "logits":
        yield "handoff.type=hidden_states", config.model_copy(update={"handoff": HiddenStatesHandoff()})
    if config.logging.gradients_every is not None:
        logging = config.logging.model_copy(update={"gradients_every": None})
        yield "logging.gradients_every=null", config.model_copy(update={"logging": logging})


def is_allowed(config: RunConfig) -> bool:
    """Copies are not validated."""
    try:
        if config.rollout is not None:
            check_on_policy(config)
    except ValueError:
        return False
    return True


def of_rollouts(config: RunConfig, situation: Situation) -> Iterator[tuple[str, RunConfig]]:
    rollout = config.rollout
    if isinstance(rollout, HFRollout) and (rows := rollouts(config, situation.student.layout.dp).rows) > 1:
        changed = rollout.model_copy(update={"batch_size": rows // 2})
        yield f"rollout.batch_size={rows // 2}", config.model_copy(update={"rollout": changed})


def of_answers(config: RunConfig) -> Iterator[tuple[str, RunConfig]]:
    questions = config.evaluation
    if questions is None or not are_asked(config):
        return
    rows = questions.teacher_batch_size // 2
    changes: dict[str, object] = {"teacher_batch_size": rows, "teachers": False} if rows else {"teachers": False}
    for key, value in changes.items():
        changed = config.model_copy(update={"evaluation": questions.model_copy(update={key: value})})
        yield f"evaluation.{key}={str(value).lower()}", changed


def with_train(config: RunConfig, key: str, value: int) -> tuple[str, RunConfig]:
    train = config.train.model_copy(update={key: value})
    return f"train.{key}={value}", config.model_copy(update={"train": train})


def of_placement(config: RunConfig, situation: Situation) -> Iterator[tuple[str, RunConfig]]:
    if situation.machine.device == "cpu":
        return
    if config.student.offload is not True:
        changed = config.student.model_copy(update={"offload": True})
        yield "student.offload=true", config.model_copy(update={"student": changed})
    for i, teacher in enumerate(config.active_teachers):
        if teacher.offload is not True:
            yield f"teachers.{i}.offload=true", with_teacher(config, i, {"offload": True})
        if teacher.dtype == "float32":
            yield f"teachers.{i}.dtype=bfloat16", with_teacher(config, i, {"dtype": "bfloat16"})


def with_teacher(config: RunConfig, i: int, update: Mapping[str, object]) -> RunConfig:
    teachers = list(config.teachers)
    teachers[i] = teachers[i].model_copy(update=update)
    return config.model_copy(update={"teachers": tuple(teachers)})


def of_parallelism(config: RunConfig, situation: Situation) -> Iterator[Variant]:
    """Tensor parallelism in place of data parallelism, where there are ranks for it."""
    if situation.student.layout.dp % 2 == 0 and config.student.lora is None:
        wider = tensor_parallel(situation.student)
        yield f"student.parallelism.tp={wider.layout.tp}", config, replace(situation, student=wider)
    for i, setup in enumerate(situation.teachers):
        if setup.layout.dp % 2 == 0:
            wider = tensor_parallel(setup)
            teachers = (*situation.teachers[:i], wider, *situation.teachers[i + 1 :])
            yield f"teachers.{i}.parallelism.tp={wider.layout.tp}", config, replace(situation, teachers=teachers)


def tensor_parallel(setup: ModelSetup) -> ModelSetup:
    layout = setup.layout
    return replace(setup, layout=replace(layout, dp=layout.dp // 2, tp=2 * layout.tp))
