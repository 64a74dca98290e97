"""Resolution of cached and served teachers to same- or cross-tokenizer teachers, and checks of their answers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.aggregation import TeacherLosses
from nemo_opd.alignment import fingerprint
from nemo_opd.config.endpoint import Endpoint
from nemo_opd.config.load import from_dict
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import (
    CachedTeacher,
    OwnIdsTeacher,
    SameTokenizerTeacher,
    ServedTeacher,
    TeacherBase,
    first_changed,
)
from nemo_opd.data.collate import collate
from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.errors import ConfigError, DataError, ModelError
from nemo_opd.logits.packed import places_in_row
from nemo_opd.logits.sparse import SparseLayout, SparseLogits
from nemo_opd.models.load import load_tokenizer
from nemo_opd.models.stored_output import require_head, sparse_layout
from nemo_opd.served.answers import served_layout
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.training.inputs import require_cache
from nemo_opd.training.model_info import ModelInfo, read_model_info, tokenizer_info
from nemo_opd.training.teacher_plan import require_common_text, require_same_tokenizer


def settle_tokenizers(config: RunConfig, device: str) -> RunConfig:
    """Return the settings with every cached or served teacher turned into type same_tokenizer or cross_tokenizer.

    Raises DataError if a folder is not a cache or its tokenizer is not the one of its answers, and ConfigError if the
    resulting type does not allow a setting.
    """
    for i, teacher in enumerate(config.active_teachers):
        if teacher.cache is not None:
            _require_original_tokenizer(teacher.cache, f"teachers.{i}.cache")
    unresolved = {
        i: teacher
        for i, teacher in enumerate(config.active_teachers)
        if isinstance(teacher, CachedTeacher | ServedTeacher)
    }
    if not unresolved:
        return config
    student = read_model_info(config.student, "student", device)
    settings = config.model_dump(mode="json")
    for i, teacher in unresolved.items():
        if isinstance(teacher, CachedTeacher):
            settings["teachers"][i] = _resolve_cached(config, i, teacher, student, device)
        else:
            settings["teachers"][i] = _resolve_served(config, i, teacher, student)
    return from_dict(settings)


def _resolve_cached(
    config: RunConfig, i: int, settings: CachedTeacher, student: ModelInfo, device: str
) -> dict[str, Any]:
    """Return a cached teacher's settings with the cache as its model folder and its type resolved."""
    manifest = require_cache(settings.cache, f"teachers.{i}.cache")
    kwargs = manifest.chat_template_kwargs if config.data.messages_key is not None else {}
    changed = {"model": settings.cache, "dtype": manifest.dtype, "chat_template_kwargs": kwargs}
    as_model = settings.model_copy(update=changed)
    teacher = read_model_info(as_model, f"teachers.{i}", device)
    if _reads_students_ids(config, i, as_model, student, teacher):
        return _same_tokenizer_settings(as_model, i)
    return as_model.model_dump(mode="json") | {"type": "cross_tokenizer"}


def _resolve_served(config: RunConfig, i: int, settings: ServedTeacher, student: ModelInfo) -> dict[str, Any]:
    """Return a served teacher's settings with its servers in the section `served` and its type resolved."""
    served = {name: getattr(settings, name) for name in Endpoint.model_fields}
    as_model = settings.model_copy(update={"served": Endpoint(**served)})
    teacher = tokenizer_info(settings, f"teachers.{i}")
    if _reads_students_ids(config, i, settings, student, teacher):
        return _same_tokenizer_settings(as_model, i)
    return as_model.model_dump(mode="json", exclude=set(served)) | {"type": "cross_tokenizer"}


def _same_tokenizer_settings(teacher: CachedTeacher | ServedTeacher, i: int) -> dict[str, Any]:
    """Return the settings of a teacher that reads the student's ids.

    Raises ConfigError if a setting for teachers with another tokenizer is changed.
    """
    cross_only = (name for name in OwnIdsTeacher.model_fields if name not in SameTokenizerTeacher.model_fields)
    if name := first_changed(teacher, cross_only):
        raise ConfigError(
            f"teachers.{i}.{name}={getattr(teacher, name)}: {teacher.name} has the student's tokenizer, so nothing is "
            "aligned; leave it out"
        )
    fields = {*TeacherBase.model_fields, "loss"}
    if teacher.context is None:
        fields -= {"chat_template", "chat_template_kwargs"}  # it reads conversations as the student renders them
    return teacher.model_dump(mode="json", include=fields) | {"type": "same_tokenizer"}


def _reads_students_ids(
    config: RunConfig,
    i: int,
    settings: CachedTeacher | ServedTeacher,
    student: ModelInfo,
    teacher: ModelInfo,
) -> bool:
    """Return whether the teacher's tokens of a text, after its context if it has one, are the student's."""
    if config.data.messages_key is not None and settings.context is None:
        ours = student.tokenizer.chat_template, dict(config.student.chat_template_kwargs)
        if ours != (teacher.tokenizer.chat_template, dict(settings.chat_template_kwargs)):
            return False
    try:
        require_same_tokenizer(i, settings, student.tokenizer, teacher.tokenizer)
        require_common_text(i, settings, student, teacher)
    except ModelError:
        return False
    return True


def check_answers(
    config: RunConfig, device: str, teachers: Sequence[ModelInfo], parts: TeacherLosses, width: int
) -> None:
    """Raise ConfigError if the run cannot learn from the content of its caches or the answers of its servers.

    width: columns of the student's head.
    """
    active = config.active_teachers
    is_idle = bool(active) and not any(teacher.is_computed for teacher in active)
    if is_idle and config.cluster.placement == "separate" and device == "cuda":
        raise ConfigError(
            "cluster.placement=separate reserves GPUs for teachers, but cached and served teachers compute nothing; "
            "write cluster.placement=colocated"
        )
    for i, teacher in enumerate(active):
        if teacher.served is not None:
            key = f"teachers.{i}.logprobs={teacher.served.logprobs}"
            _check_likeliest(config, i, parts, served_layout(teacher.served, teachers[i].vocab_size), width, key)
            _require_no_entropy(config, f"teachers.{i} ({teacher.name}) is served")
        elif teacher.cache is not None:
            _check_cache(config, i, teacher.cache, teachers[i], parts, width)


def segment_ids(sample: Sample, i: int) -> NDArray[np.int32] | None:
    """Return the ids that teacher i's cache stores for a sample; None if the teacher reads nothing of it."""
    ids = sample.teachers[i].tokens.ids
    return ids if sample.route in (None, i) and len(ids) > 1 else None


def require_stored(config: RunConfig, samples: Collection[Sample]) -> None:
    """Raise DataError, naming the teacher, for an unusable cache.

    It has a damaged shard or, unless `on_missing: ask` will fill it, lacks its head or the answer to one of `samples`.
    """
    for i, teacher in enumerate(config.active_teachers):
        if teacher.cache is None:
            continue
        try:
            reader = CacheReader(teacher.cache)
            if teacher.on_missing == "ask":
                continue
            require_head(reader)
            for ids in (segment_ids(sample, i) for sample in samples):
                if ids is not None:
                    reader.segment(ids)
        except DataError as error:
            raise DataError(f"teachers.{i}.cache: {error}") from error


def _check_cache(config: RunConfig, i: int, cache: str, teacher: ModelInfo, parts: TeacherLosses, width: int) -> None:
    key = f"teachers.{i}.cache={cache}"
    manifest = require_cache(cache, f"teachers.{i}.cache")
    if teacher.vocab_size != manifest.vocab_size:
        raise ConfigError(
            f"{key}: its answers are for a vocabulary of {manifest.vocab_size} tokens, but its tokenizer and "
            f"config.json have {teacher.vocab_size}; build the cache again"
        )
    if manifest.is_served:
        _require_no_entropy(config, f"the answers in {key} came from servers")
    if manifest.form == "top_k":
        _check_likeliest(config, i, parts, sparse_layout(manifest), width, key)


def _require_original_tokenizer(cache: str, key: str) -> None:
    """Raise DataError if the folder is not a cache, or its tokenizer is not the one its answers were made with."""
    manifest = require_cache(cache, key)
    if (present := fingerprint(load_tokenizer(cache, key=key))) != manifest.tokenizer:
        raise DataError(
            f"{key}: its answers were made with another tokenizer than the one in it (fingerprints "
            f"{manifest.tokenizer[:12]}… and {present[:12]}…); put the tokenizer of {manifest.teacher} back, or "
            "build the cache in another folder"
        )


def _require_no_entropy(config: RunConfig, reason: str) -> None:
    """Raise ConfigError if teachers are weighted by entropy: the likeliest tokens alone do not determine it."""
    if config.aggregation.score == "entropy":
        raise ConfigError(
            f"aggregation.weights=entropy: {reason}, and servers do not report the entropy over all tokens; write "
            "aggregation.weights=bits_per_byte or max_probability"
        )


def _check_likeliest(
    config: RunConfig, i: int, parts: TeacherLosses, layout: SparseLayout, width: int, key: str
) -> None:
    """Plan a teacher's loss on an empty sample. Raises ConfigError if the loss needs more than the likeliest tokens."""
    if config.aggregation.type == "averaged_logits":
        way_out = "build it with --hidden-states" if config.active_teachers[i].cache else "name its model's folder"
        raise ConfigError(
            f"{key}: only the {layout.top_k} likeliest tokens of each position are known, but aggregation.type="
            f"averaged_logits needs the logits of all tokens; {way_out}, or write aggregation=weighted_sum"
        )
    part = next(part for part in parts.parts if part.teacher == i)
    teacher = SparseLogits(torch.zeros(1, layout.handed_bytes, dtype=torch.uint8), layout, places_in_row([1], 1))
    batch = collate([_sample_without_labels(config)])
    rows = batch.teachers[i]
    try:
        part.term.plan(torch.zeros(1, 1, width), teacher, rows.student_side(batch.student), rows, 1.0)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def _sample_without_labels(config: RunConfig) -> Sample:
    """Return a sample of a single token, which is not learned."""
    arrays = Tokens(*(torch.zeros(1, dtype=dtype).numpy() for dtype in (torch.int32, torch.bool, torch.int32)))
    none = torch.full((1,), -1, dtype=torch.int32).numpy()
    teachers = tuple(
        TeacherSample(arrays, None if teacher.type == "same_tokenizer" else Chunks(none, none, 0, 0))
        for teacher in config.active_teachers
    )
    return Sample(arrays, teachers)
