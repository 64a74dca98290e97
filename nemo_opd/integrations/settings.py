"""Settings of a distillation in another library's training loop."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from nemo_opd.config.load import from_dict
from nemo_opd.config.parallelism import Parallelism
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import OwnIdsTeacher, Teacher
from nemo_opd.errors import ConfigError

_USED_KEYS: dict[str, set[str] | None] = {
    "student": {"model", "tokenizer", "chat_template", "chat_template_kwargs"},
    "teachers": None,
    "loss": None,
    "aggregation": None,
    "data": {"text_key", "messages_key", "tools_key", "learned_turns", "append_eos", "special_tokens"},
    "train": {"max_length"},
}
"""Sections that have an effect, each with the keys that do, or None for all keys."""


def read_settings(settings: Mapping[str, Any]) -> RunConfig:
    """Return a run's config from settings in the form of `nemo_opd.distil`.

    Raises ConfigError if settings are invalid, are decided by the trainer, or need nemo_opd's own loop.
    """
    for key in _without_effect(settings):
        raise ConfigError(f"{key}: the trainer's own arguments, model and datasets decide this here; leave it out")
    train, data = settings.get("train", {}), settings.get("data", {})
    if isinstance(train, Mapping):  # validation reports other types
        train = {"max_steps": 1, "global_batch_size": 1, "micro_batch_size": 1, **train}
    if isinstance(data, Mapping):
        packing = {} if data.get("messages_key") else {"packing": False}  # conversations are never packed
        data = {**data, **packing, "cache": False}
    config = from_dict({**settings, "train": train, "data": data})
    for key, reason in _unsupported(config):
        raise ConfigError(f"{key}: {reason}; leave it out, or use nemo_opd.distil")
    return config


def _without_effect(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield the keys of a run that have no effect here; validation reports misspelled keys."""
    for section in (name for name in settings if name in RunConfig.model_fields):
        keys = _USED_KEYS.get(section, set())
        if section not in _USED_KEYS:
            yield section
        elif keys is not None and isinstance(settings[section], Mapping):
            model = RunConfig.model_fields[section].annotation
            assert isinstance(model, type)
            assert issubclass(model, BaseModel)
            yield from (f"{section}.{key}" for key in settings[section] if key in model.model_fields.keys() - keys)


def _unsupported(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield (key, reason) for settings that need nemo_opd's own loop."""
    if config.loss.scaling == "dynamic":
        yield "loss.scaling=dynamic", "its averages would not be in the trainer's checkpoints"
    if config.aggregation.type == "select_teacher":
        yield "aggregation.type=select_teacher", "all teachers must have read a global batch before its first gradient"
    for i, teacher in enumerate(config.active_teachers):
        yield from ((f"teachers.{i}.{key}", reason) for key, reason in _unsupported_of_teacher(teacher))


def _unsupported_of_teacher(teacher: Teacher) -> Iterator[tuple[str, str]]:
    if teacher.is_student:
        yield f"weights={teacher.weights}", "the trainer owns the student's weights"
    elif not teacher.is_computed:
        yield f"type={teacher.type}", "only models that are loaded in this process can be teachers here"
    if teacher.context is not None:
        yield "context", "teachers read the same text as the student here"
    if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr is not None:
        yield f"projection_lr={teacher.projection_lr:g}", "the trainer's optimizer has the student's weights only"
    if teacher.parallelism != Parallelism():
        yield "parallelism", "each process has unsharded teachers here"
    for key in ("compile", "fused_layers", "offload"):
        if (value := getattr(teacher, key)) not in (False, "auto"):
            yield f"{key}={str(value).lower()}", "teachers are transformers' own models here"
