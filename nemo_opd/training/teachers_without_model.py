"""Teachers that are cached or served, made of the type that their tokenizer is, and their losses tried before anything
starts.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.aggregation import Parts
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
    """Return the settings with each teacher of type cached or served as of type same_tokenizer or cross_tokenizer.

    Raises DataError for a folder that is no cache, or has another tokenizer than its answers, and ConfigError where
    what then has a type is not allowed.
    """
    for i, teacher in enumerate(config.active_teachers):
        if teacher.cache is not None:
            _require_own_tokenizer(teacher.cache, f"teachers.{i}.cache")
    without = {
        i: each for i, each in enumerate(config.active_teachers) if isinstance(each, CachedTeacher | ServedTeacher)
    }
    if not without:
        return config
    student = read_model_info(config.student, "student", device)
    settings = config.model_dump(mode="json")
    for i, teacher in without.items():
        if isinstance(teacher, CachedTeacher):
            settings["teachers"][i] = _settled_cache(config, i, teacher, student, device)
        else:
            settings["teachers"][i] = _settled_server(config, i, teacher, student)
    return from_dict(settings)


def _settled_cache(
    config: RunConfig, i: int, settings: CachedTeacher, student: ModelInfo, device: str
) -> dict[str, Any]:
    """Return the settings of a teacher whose model's folder is the cache."""
    manifest = require_cache(settings.cache, f"teachers.{i}.cache")
    kwargs = manifest.chat_template_kwargs if config.data.messages_key is not None else {}
    changed = {"model": settings.cache, "dtype": manifest.dtype, "chat_template_kwargs": kwargs}
    as_model = settings.model_copy(update=changed)
    teacher = read_model_info(as_model, f"teachers.{i}", device)
    if _reads_students_ids(config, i, as_model, student, teacher):
        return _of_same_tokenizer(as_model, i)
    return as_model.model_dump(mode="json") | {"type": "cross_tokenizer"}


def _settled_server(config: RunConfig, i: int, settings: ServedTeacher, student: ModelInfo) -> dict[str, Any]:
    """Return the settings of a teacher with its servers in a section."""
    served = {name: getattr(settings, name) for name in Endpoint.model_fields}
    as_model = settings.model_copy(update={"served": Endpoint(**served)})
    teacher = tokenizer_info(settings, f"teachers.{i}")
    if _reads_students_ids(config, i, settings, student, teacher):
        return _of_same_tokenizer(as_model, i)
    return as_model.model_dump(mode="json", exclude=set(served)) | {"type": "cross_tokenizer"}


def _of_same_tokenizer(teacher: CachedTeacher | ServedTeacher, i: int) -> dict[str, Any]:
    """Return the settings of a teacher that reads the student's ids.

    Raises ConfigError for settings of teachers with another tokenizer.
    """
    of_own_ids = (name for name in OwnIdsTeacher.model_fields if name not in SameTokenizerTeacher.model_fields)
    if name := first_changed(teacher, of_own_ids):
        raise ConfigError(
            f"teachers.{i}.{name}={getattr(teacher, name)}: {teacher.name} has the student's tokenizer, so nothing is "
            "aligned; leave it out"
        )
    own = {*TeacherBase.model_fields, "loss"}
    if teacher.context is None:
        own -= {"chat_template", "chat_template_kwargs"}  # as the student renders
    return teacher.model_dump(mode="json", include=own) | {"type": "same_tokenizer"}


def _reads_students_ids(
    config: RunConfig,
    i: int,
    settings: CachedTeacher | ServedTeacher,
    student: ModelInfo,
    teacher: ModelInfo,
) -> bool:
    """Return whether the teacher's tokens of a text, after its own prompt where it has one, are the student's."""
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


def check_answers(config: RunConfig, device: str, teachers: Sequence[ModelInfo], parts: Parts, width: int) -> None:
    """Raise ConfigError where a run cannot learn from what its caches hold, or its servers report.

    width: columns of the student's head.
    """
    active = config.active_teachers
    is_idle = bool(active) and not any(teacher.is_computed for teacher in active)
    if is_idle and config.cluster.placement == "separate" and device == "cuda":
        raise ConfigError(
            "cluster.placement=separate gives teachers GPUs of their own, and those that are cached or served compute "
            "nothing; write cluster.placement=colocated"
        )
    for i, teacher in enumerate(active):
        if teacher.served is not None:
            key = f"teachers.{i}.logprobs={teacher.served.logprobs}"
            _check_likeliest(config, i, parts, served_layout(teacher.served, teachers[i].vocab_size), width, key)
            _require_no_entropy(config, f"teachers.{i} ({teacher.name}) is served")
        elif teacher.cache is not None:
            _check_cache(config, i, teacher.cache, teachers[i], parts, width)


def segment_ids(sample: Sample, i: int) -> NDArray[np.int32] | None:
    """Return the ids of the segment of a sample in the cache of teacher i; None where that reads nothing."""
    ids = sample.teachers[i].tokens.ids
    return ids if sample.route in (None, i) and len(ids) > 1 else None


def require_stored(config: RunConfig, samples: Collection[Sample]) -> None:
    """Raise DataError, naming the teacher, for a cache with a damaged shard, or without its head or an answer to one of
    a few samples where nobody is to be asked about it.
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


def _check_cache(config: RunConfig, i: int, cache: str, teacher: ModelInfo, parts: Parts, width: int) -> None:
    key = f"teachers.{i}.cache={cache}"
    manifest = require_cache(cache, f"teachers.{i}.cache")
    if teacher.vocab_size != manifest.vocab_size:
        raise ConfigError(
            f"{key}: its answers are about {manifest.vocab_size} tokens, and its tokenizer and config.json have "
            f"{teacher.vocab_size}; build the cache again"
        )
    if manifest.is_served:
        _require_no_entropy(config, f"the answers in {key} are those of servers")
    if manifest.form == "top_k":
        _check_likeliest(config, i, parts, sparse_layout(manifest), width, key)


def _require_own_tokenizer(cache: str, key: str) -> None:
    """Raise DataError for a folder in which another tokenizer has been put than that of the answers, or no cache."""
    manifest = require_cache(cache, key)
    if (found := fingerprint(load_tokenizer(cache, key=key))) != manifest.tokenizer:
        raise DataError(
            f"{key}: the tokenizer in it is not that of its answers (fingerprint {found[:12]}…, and not "
            f"{manifest.tokenizer[:12]}…); put the tokenizer of {manifest.teacher} back, or build the cache in another "
            "folder"
        )


def _require_no_entropy(config: RunConfig, what: str) -> None:
    """Raise ConfigError where teachers are weighted by their entropy, of which likeliest tokens say a part."""
    if config.aggregation.score == "entropy":
        raise ConfigError(
            f"aggregation.weights=entropy: {what}, and servers say nothing of the entropy of all tokens; write "
            "aggregation.weights=bits_per_byte or max_probability"
        )


def _check_likeliest(config: RunConfig, i: int, parts: Parts, layout: SparseLayout, width: int, key: str) -> None:
    """Plan a teacher's loss without a unit. Raises ConfigError where the likeliest tokens are not enough for it."""
    if config.aggregation.type == "averaged_logits":
        way_out = "build it with --hidden-states" if config.active_teachers[i].cache else "name its model's folder"
        raise ConfigError(
            f"{key}: the {layout.top_k} likeliest tokens of each position are known, and aggregation.type="
            f"averaged_logits needs the logits of all; {way_out}, or write aggregation=weighted_sum"
        )
    part = next(part for part in parts.parts if part.teacher == i)
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
