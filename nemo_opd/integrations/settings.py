"""Settings of a distillation whose loop is another trainer's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_opd.config.load import from_dict
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import OwnIdsTeacher, Teacher
from nemo_opd.errors import ConfigError

_READ: dict[str, set[str] | None] = {
    "student": {"model", "tokenizer", "chat_template", "chat_template_kwargs"},
    "teachers": None,
    "loss": None,
    "aggregation": None,
    "data": {"text_key", "messages_key", "tools_key", "learned_turns", "append_eos", "special_tokens"},
    "train": {"max_length"},
}
"""Sections that have an effect, each with its keys that have one; None: all."""


def read_settings(given: Mapping[str, Any]) -> RunConfig:
    """Return a run's settings with `given`, as `nemo_opd.distil` takes them.

    Raises ConfigError for what is not valid, what the trainer decides, and what needs our own loop.
    """
    for key in _without_effect(given):
        raise ConfigError(f"{key}: the trainer's own arguments, model and datasets decide this here; leave it out")
    train, data = given.get("train", {}), given.get("data", {})
    if isinstance(train, Mapping):  # validation tells what is no section
        train = {"max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1, **train}
    if isinstance(data, Mapping):
        packing = {} if data.get("messages_key") else {"packing": False}  # a conversation is never packed
        data = {**data, **packing, "cache": False}
    config = from_dict({**given, "train": train, "data": data})
    for key, reason in _beyond_reach(config):
        raise ConfigError(f"{key}: {reason}; leave it out, or use nemo_opd.distil")
    return config


def _without_effect(given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a run that have no effect here; misspelled ones are left to validation."""
    for section in (each for each in given if each in RunConfig.model_fields):
        keys = _READ.get(section, set())
        if section not in _READ:
            yield section
        elif keys is not None and isinstance(given[section], Mapping):
            model = RunConfig.model_fields[section].annotation
            assert isinstance(model, type)
            assert issubclass(model, BaseModel)
            yield from (f"{section}.{key}" for key in given[section] if key in model.model_fields.keys() - keys)


def _beyond_reach(config: RunConfig) -> Iterator[tuple[str, str]]:
    if config.loss.scaling == "dynamic":
        yield "loss.scaling=dynamic", "its averages would not be in the trainer's checkpoints"
    if config.aggregation.type == "select_teacher":
        yield "aggregation.type=select_teacher", "all teachers must have read a global batch before its first gradient"
    for i, teacher in enumerate(config.active_teachers):
        yield from ((f"teachers.{i}.{key}", reason) for key, reason in _of_teacher(teacher))


def _of_teacher(teacher: Teacher) -> Iterator[tuple[str, str]]:
    if teacher.is_student:
        yield f"weights={teacher.weights}", "the student's weights are the trainer's"
    elif not teacher.is_computed:
        yield f"type={teacher.type}", "only models that are loaded in this process answer here"
    if teacher.context is not None:
        yield "context", "teachers read what the student reads here"
    if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr is not None:
        yield f"projection_lr={teacher.projection_lr:g}", "the trainer's optimizer has the student's weights alone"
    if teacher.parallelism != Parallelism():
        yield "parallelism", "each process has whole teachers here"
    for key in ("compile", "fused_layers", "offload"):
        if (value := getattr(teacher, key)) not in (False, "auto"):
            yield f"{key}={str(value).lower()}", "teachers are transformers' own models here"
