"""Cached teachers, made of the type that their tokenizer is, and their losses tried before anything starts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from nemo_opd.aggregation import Parts
from nemo_opd.config.load import from_dict
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CachedTeacher, OwnIdsTeacher, SameTokenizerTeacher, TeacherBase
from nemo_opd.data.collate import collate
from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.errors import ConfigError, ModelError
from nemo_opd.logits.packed import places_in_row
from nemo_opd.logits.sparse import SparseLogits
from nemo_opd.models.stored_output import sparse_layout
from nemo_opd.teacher_cache.manifest import CacheManifest
from nemo_opd.training.inputs import require_cache
from nemo_opd.training.model_info import ModelInfo, read_model_info
from nemo_opd.training.teacher_plan import require_common_text, require_same_tokenizer


def settle_cached(config: RunConfig, device: str) -> RunConfig:
    """Return the settings with each teacher of type cached as one of type same_tokenizer or cross_tokenizer.

    Raises DataError for a folder that is no cache, ConfigError where what then has a type is not allowed.
    """
    cached = {i: each for i, each in enumerate(config.active_teachers) if isinstance(each, CachedTeacher)}
    if not cached:
        return config
    student = read_model_info(config.student, "student", device)
    settings = config.model_dump(mode="json")
    for i, teacher in cached.items():
        settings["teachers"][i] = _settled(config, i, teacher, student, device)
    return from_dict(settings)


def _settled(config: RunConfig, i: int, settings: CachedTeacher, student: ModelInfo, device: str) -> dict[str, Any]:
    """Return the settings of a teacher whose model's folder is the cache."""
    manifest = require_cache(settings.cache, f"teachers.{i}.cache")
    is_chat, reads_own_prompt = config.data.messages_key is not None, settings.context is not None
    as_model = settings.model_copy(update={"model": settings.cache, "dtype": manifest.dtype})
    kwargs = manifest.chat_template_kwargs if is_chat else {}
    if _reads_students_ids(config, i, as_model, manifest, student, device):
        _require_no_alignment(settings, i)
        return as_model.model_dump(mode="json", include={*TeacherBase.model_fields, "loss"}) | {
            "type": "same_tokenizer",
            "chat_template_kwargs": kwargs if reads_own_prompt else {},
        }
    return as_model.model_dump(mode="json") | {"type": "cross_tokenizer", "chat_template_kwargs": kwargs}


def _require_no_alignment(settings: CachedTeacher, i: int) -> None:
    """Raise ConfigError for settings of teachers with another tokenizer."""
    for name in OwnIdsTeacher.model_fields.keys() - SameTokenizerTeacher.model_fields.keys():
        default = OwnIdsTeacher.model_fields[name].get_default(call_default_factory=True)
        if (value := getattr(settings, name)) != default:
            raise ConfigError(
                f"teachers.{i}.{name}={value}: the answers in {settings.cache} are about the student's own tokens, so "
                "nothing is aligned; leave it out"
            )


def _reads_students_ids(
    config: RunConfig, i: int, settings: CachedTeacher, manifest: CacheManifest, student: ModelInfo, device: str
) -> bool:
    """Return whether the teacher's tokens of a text, behind the prompt where it has its own, are the student's."""
    teacher = read_model_info(settings, f"teachers.{i}", device)
    if config.data.messages_key is not None and settings.context is None:
        ours = student.tokenizer.chat_template, dict(config.student.chat_template_kwargs)
        if ours != (teacher.tokenizer.chat_template, manifest.chat_template_kwargs):
            return False
    try:
        require_same_tokenizer(i, settings, student.tokenizer, teacher.tokenizer)
        require_common_text(i, settings, student, teacher)
    except ModelError:
        return False
    return True


def check_cached(config: RunConfig, device: str, teachers: Sequence[ModelInfo], parts: Parts, width: int) -> None:
    """Raise ConfigError where a run cannot learn from what its caches hold. width: columns of the student's head."""
    active = config.active_teachers
    is_idle = bool(active) and all(teacher.cache for teacher in active)
    if is_idle and config.cluster.placement == "separate" and device == "cuda":
        raise ConfigError(
            "cluster.placement=separate gives teachers GPUs of their own, and cached ones compute nothing; write "
            "cluster.placement=colocated"
        )
    for i, teacher in enumerate(active):
        if teacher.cache is None:
            continue
        manifest = require_cache(teacher.cache, f"teachers.{i}.cache")
        if teachers[i].vocab_size != manifest.vocab_size:
            raise ConfigError(
                f"teachers.{i}.cache={teacher.cache}: its answers are about {manifest.vocab_size} tokens, and its "
                f"tokenizer and config.json have {teachers[i].vocab_size}; build the cache again"
            )
        if manifest.form == "top_k":
            _try_loss(config, i, parts, manifest, width)


def _try_loss(config: RunConfig, i: int, parts: Parts, manifest: CacheManifest, width: int) -> None:
    """Plan a teacher's loss without a unit. Raises ConfigError where that needs what likeliest tokens do not say."""
    key = f"teachers.{i}.cache={config.active_teachers[i].cache}"
    if config.aggregation.type == "averaged_logits":
        raise ConfigError(
            f"{key} has the {manifest.top_k} likeliest tokens of each position, and aggregation.type=averaged_logits "
            "needs the logits of all; build it with --hidden-states, or write aggregation=weighted_sum"
        )
    part = next(part for part in parts.parts if part.teacher == i)
    layout = sparse_layout(manifest)
    teacher = SparseLogits(torch.zeros(1, layout.handed_bytes, dtype=torch.uint8), layout, places_in_row([1], 1))
    batch = collate([_nothing(config, i)])
    own = batch.teachers[i]
    try:
        part.term.plan(torch.zeros(1, 1, width), teacher, own.student_side(batch.student), own, 1.0)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _nothing(config: RunConfig, i: int) -> Sample:
    """Return a sample of one token, which is not learned."""
    arrays = Tokens(*(torch.zeros(1, dtype=dtype).numpy() for dtype in (torch.int32, torch.bool, torch.int32)))
    none = torch.full((1,), -1, dtype=torch.int32).numpy()
    teachers = tuple(
        TeacherSample(arrays, None if teacher.type == "same_tokenizer" else Chunks(none, none, 0, 0))
        for teacher in config.active_teachers
    )
    return Sample(arrays, teachers)
