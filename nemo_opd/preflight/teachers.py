"""Teachers of a run: projections, checks of tokenizer pairs (methods.md §4), and cached or served teachers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedTokenizerFast

from nemo_opd.aggregation import TrainingObjective
from nemo_opd.alignment import fingerprint
from nemo_opd.alignment.pieces import ADDED
from nemo_opd.config.model import Model, Parallelism
from nemo_opd.config.run import RunConfig, from_dict
from nemo_opd.config.teacher import (
    CachedTeacher,
    CrossTokenizerTeacher,
    Endpoint,
    OwnIdsTeacher,
    SameTokenizerTeacher,
    ServedTeacher,
    Teacher,
    TeacherBase,
    UnresolvedTeacher,
    first_changed,
)
from nemo_opd.data.collate import collate
from nemo_opd.data.samples import Chunks, Sample, TeacherSample, Tokens
from nemo_opd.errors import AlignmentError, ConfigError, DataError, ModelError, ProjectionError, run_all
from nemo_opd.logits.rows import SparseLayout, SparseLogits
from nemo_opd.logits.sources import places_in_row
from nemo_opd.losses.learned_projection import NOTHING_PAIRED, learnable_pairs, learnable_rows
from nemo_opd.losses.sparse_projection import TokenPairs
from nemo_opd.models.folder import PLAIN, template_setting
from nemo_opd.models.load import compute_dtype, load_tokenizer
from nemo_opd.models.stored_output import require_head, served_layout, sparse_layout
from nemo_opd.preflight.model_info import ModelInfo, ModelSize, read_model_info, tokenizer_info
from nemo_opd.projection import Audit, ProjectionMatrix, audit, cached_projection
from nemo_opd.teacher_cache.reader import CacheReader
from nemo_opd.teacher_cache.shard import ASK_MISSING, read_manifest, require_cache


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    """Vocabulary size of a teacher and the projection of the student's vocabulary to it."""

    vocab_size: int
    projection: ProjectionMatrix | None
    """None if the teacher has the student's tokenizer."""
    audit: Audit | None
    num_learned: int = 0
    """Elements of the learned Δ of the projection; 0 if the projection is fixed."""


def plan_teacher(config: RunConfig, i: int, student: ModelInfo, teacher: ModelInfo) -> TeacherPlan:
    """Return the plan of an active teacher. Raises ModelError or ProjectionError if it does not fit the student."""
    settings = config.active_teachers[i]
    if not isinstance(settings, CrossTokenizerTeacher):
        require_same_tokenizer(i, settings, student.tokenizer, teacher.tokenizer)
        _require_common_text(i, settings, student, teacher)
        return TeacherPlan(teacher.vocab_size, None, None)
    _require_other_text(config, i, student, teacher)
    matrix = _load_projection(i, settings, student.tokenizer, teacher.tokenizer)
    num_learned = 0
    if settings.projection_lr:
        _require_rows_to_learn(i, settings, matrix, config.term(i).type, (student.vocab_size, teacher.vocab_size))
        num_learned = len(learnable_rows(matrix)) * matrix.indices.shape[1]
    return TeacherPlan(teacher.vocab_size, matrix, audit(student.tokenizer, teacher.tokenizer, matrix), num_learned)


def _require_rows_to_learn(
    i: int, settings: CrossTokenizerTeacher, matrix: ProjectionMatrix, loss: str, sizes: tuple[int, int]
) -> None:
    """Raise ProjectionError if the loss depends on no learnable weight of the projection."""
    setting = f"teachers.{i}.projection_lr={settings.projection_lr:g}"
    if not len(learnable_rows(matrix)):
        raise ProjectionError(
            f"{setting}: no row of the projection has several entries, so it has nothing to learn; leave it out, or "
            "build the projection with a larger top_k"
        )
    if loss == "h_kl" and not len(learnable_pairs(matrix, TokenPairs.relaxed(matrix, *sizes, torch.device("cpu")))):
        raise ProjectionError(f"{setting}: {NOTHING_PAIRED}; leave it out, or write teachers.{i}.loss.type=p_kl")


def _load_projection(
    i: int, settings: CrossTokenizerTeacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> ProjectionMatrix:
    """Load or build the matrix. Raises ProjectionError, with the key, if the file is unreadable or of another pair."""
    if settings.projection == "auto":
        matrix, _ = cached_projection(student, tokenizer, settings.top_k, roles=settings.roles_by_token)
        return matrix
    try:
        return ProjectionMatrix.load(settings.projection, student_tokenizer=student, teacher_tokenizer=tokenizer)
    except ProjectionError as error:
        raise ProjectionError(f"teachers.{i}.projection: {error}") from error


def require_same_tokenizer(
    i: int, settings: Teacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Raise ModelError if a common token has different ids, or a common id stands for different tokens."""
    ours, theirs = student.get_vocab(), tokenizer.get_vocab()
    their_tokens = {index: token for token, index in theirs.items()}
    differing = [
        f"{token!r} is {index} and {theirs[token]}"
        if token in theirs
        else f"{index} is {token!r} and {their_tokens[index]!r}"
        for token, index in sorted(ours.items(), key=lambda item: item[1])
        if theirs.get(token, index) != index or their_tokens.get(index, token) != token
    ]
    if differing:
        raise ModelError(
            f"teachers.{i}.type=same_tokenizer: the tokenizer of {settings.name} differs from the student's in "
            f"{len(differing)} of {len(ours)} tokens ({'; '.join(differing[:2])}); write type: cross_tokenizer"
        )


def _require_common_text(i: int, settings: Teacher, student: ModelInfo, teacher: ModelInfo) -> None:
    """Raise ModelError if one tokenizer has tokens of ordinary text that the other lacks: they split texts differently.

    Special and added tokens may be missing: they occur in few texts.
    """
    for ours, theirs, our_name, their_name in (
        (student, teacher, "the student's tokenizer", settings.name),
        (teacher, student, f"the tokenizer of {settings.name}", "the student"),
    ):
        ids = ours.ids_missing_in(theirs)
        is_extra = ours.pieces.is_special | (ours.pieces.origin == ADDED)
        ordinary = ids[~is_extra[ids]]
        if len(ordinary):
            token = ours.tokenizer.convert_ids_to_tokens(int(ordinary[0]))
            raise ModelError(
                f"teachers.{i}.type=same_tokenizer: {our_name} has {len(ordinary)} tokens of ordinary text that "
                f"{their_name} lacks (such as {int(ordinary[0])}, {token!r}), so they split texts differently; write "
                "type: cross_tokenizer"
            )


def _require_other_text(config: RunConfig, i: int, student: ModelInfo, teacher: ModelInfo) -> None:
    """Raise ModelError if a cross_tokenizer teacher has the student's tokenizer, so that alignment is the identity.

    Allowed if it reads conversations in another chat template.
    """
    settings = config.active_teachers[i]
    ours = student.tokenizer.chat_template, config.student.chat_template_kwargs
    theirs = teacher.tokenizer.chat_template, settings.chat_template_kwargs
    has_other_template = config.data.is_chat and ours != theirs
    if student.pieces.fingerprint == teacher.pieces.fingerprint and not has_other_template:
        raise ModelError(
            f"teachers.{i}.type=cross_tokenizer: {settings.name} has the student's tokenizer, so there is nothing to "
            "align; write type: same_tokenizer"
        )


def require_templates(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> None:
    """Raise AlignmentError, with the keys, if models that render conversations have no chat template."""
    run_all(
        partial(_require_template, config, key, settings)
        for key, settings, info in template_readers(config, student, teachers)
        if not info.tokenizer.chat_template
    )


def _require_template(config: RunConfig, key: str, settings: Model) -> NoReturn:
    value = template_setting(config.student.chat_template or config.student.tokenizer_source[1])
    plain = "" if value == PLAIN else f", {key}.chat_template={PLAIN}"
    texts = ""
    if config.rollout is not None and key == "student" and (columns := config.data.prompt_key):
        texts = f", or data.prompt_key=[] data.text_key={columns[0]} to continue texts"
    raise AlignmentError(
        f"{key}.{'='.join(settings.tokenizer_source)} has no chat template, which conversations need; write "
        f"{key}.chat_template={value}{plain}, a file, or {key}.tokenizer with the instruct model's tokenizer{texts}"
    )


def template_readers(
    config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> list[tuple[str, Model, ModelInfo]]:
    """Return section, settings and info of each model that renders conversations with its own chat template."""
    if not config.data.is_chat:
        return []
    return [("student", config.student, student)] + [
        (f"teachers.{i}", settings, teacher)
        for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True))
        if isinstance(settings, CrossTokenizerTeacher) or settings.context is not None
    ]


def output_columns(config: RunConfig, settings: Teacher, size: ModelSize, device: str) -> tuple[int | None, int]:
    """Return the width of the teacher's output (None: the vocabulary size) and its bytes per element."""
    itemsize = compute_dtype(settings.dtype, device).itemsize
    if settings.served is not None:
        return served_layout(settings.served, size.vocab_size).handed_bytes, 1
    if settings.cache is None:
        return None if config.handoff.type == "logits" else size.hidden_size, itemsize
    manifest = read_manifest(settings.cache)
    if manifest.form == "top_k":
        return sparse_layout(manifest).handed_bytes, 1
    return manifest.hidden_size, itemsize


def settle_tokenizers(config: RunConfig, device: str) -> RunConfig:
    """Return the settings with the type of every teacher resolved to same_tokenizer or cross_tokenizer.

    Raises DataError if a folder is not a cache or its tokenizer is not the one of its answers, and ConfigError if the
    resulting type does not allow a setting.
    """
    for i, teacher in enumerate(config.active_teachers):
        if teacher.cache is not None:
            _require_original_tokenizer(teacher.cache, f"teachers.{i}.cache")
    unresolved = {
        i: teacher for i, teacher in enumerate(config.active_teachers) if isinstance(teacher, UnresolvedTeacher)
    }
    if not unresolved:
        return config
    # Devices for its layout may be missing where a checkpoint is converted.
    unsharded = config.student.model_copy(update={"parallelism": Parallelism()})
    student = read_model_info(unsharded, "student", device)
    settings = config.model_dump(mode="json")
    for i, teacher in unresolved.items():
        settings["teachers"][i] = _resolve(config, i, teacher, student, device)
    return from_dict(settings)


def _resolve(config: RunConfig, i: int, settings: UnresolvedTeacher, student: ModelInfo, device: str) -> dict[str, Any]:
    """Return a teacher's settings with its type resolved.

    The folder of a cached teacher's model is its cache, and the servers of a served one are in the section `served`.
    """
    key, in_served = f"teachers.{i}", set[str]()
    if isinstance(settings, CachedTeacher):
        manifest = require_cache(settings.cache, f"{key}.cache")
        kwargs = manifest.chat_template_kwargs if config.data.is_chat else {}
        changed = {"model": settings.cache, "dtype": manifest.dtype, "chat_template_kwargs": kwargs}
        settings = settings.model_copy(update=changed)
        teacher = read_model_info(settings, key, device)
    else:
        teacher = tokenizer_info(settings, key)
        if isinstance(settings, ServedTeacher):
            in_served = {*Endpoint.model_fields}
            served = Endpoint(**{name: getattr(settings, name) for name in in_served})
            settings = settings.model_copy(update={"served": served})
    if _reads_students_ids(config, i, settings, student, teacher):
        return _same_tokenizer_settings(config, settings, i)
    return settings.model_dump(mode="json", exclude=in_served) | {"type": "cross_tokenizer"}


def _same_tokenizer_settings(config: RunConfig, teacher: UnresolvedTeacher, i: int) -> dict[str, Any]:
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
    is_asked = config.evaluation is not None and config.evaluation.teachers
    if teacher.context is None and not is_asked:
        fields -= {"chat_template", "chat_template_kwargs"}  # it reads conversations as the student renders them
    return teacher.model_dump(mode="json", include=fields) | {"type": "same_tokenizer"}


def _reads_students_ids(
    config: RunConfig,
    i: int,
    settings: UnresolvedTeacher,
    student: ModelInfo,
    teacher: ModelInfo,
) -> bool:
    """Return whether the teacher's tokens of a text, after its context if it has one, are the student's."""
    if config.data.is_chat and settings.context is None:
        ours = student.tokenizer.chat_template, dict(config.student.chat_template_kwargs)
        theirs = teacher.tokenizer.chat_template, dict(settings.chat_template_kwargs)
        if theirs not in (ours, (None, {})):  # without a template it can read only the student's rendering
            return False
    try:
        require_same_tokenizer(i, settings, student.tokenizer, teacher.tokenizer)
        _require_common_text(i, settings, student, teacher)
    except ModelError:
        return False
    return True


def check_answers(
    config: RunConfig, device: str, teachers: Sequence[ModelInfo], objective: TrainingObjective, width: int
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
            _check_likeliest(config, i, objective, served_layout(teacher.served, teachers[i].vocab_size), width, key)
            _require_no_entropy(config, f"teachers.{i} ({teacher.name}) is served")
        elif teacher.cache is not None:
            _check_cache(config, i, teacher.cache, teachers[i], objective, width)


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
            problem = str(error).replace(ASK_MISSING, f"teachers.{i}.on_missing=ask")
            raise DataError(f"teachers.{i}.cache: {problem}") from error


def _check_cache(
    config: RunConfig, i: int, cache: str, teacher: ModelInfo, objective: TrainingObjective, width: int
) -> None:
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
        _check_likeliest(config, i, objective, sparse_layout(manifest), width, key)


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
    config: RunConfig, i: int, objective: TrainingObjective, layout: SparseLayout, width: int, key: str
) -> None:
    """Plan a teacher's loss on an empty sample. Raises ConfigError if the loss needs more than the likeliest tokens."""
    if config.aggregation.type == "averaged_logits":
        way_out = "build it with --hidden-states" if config.active_teachers[i].cache else "name its model's folder"
        raise ConfigError(
            f"{key}: only the {layout.top_k} likeliest tokens of each position are known, but aggregation.type="
            f"averaged_logits needs the logits of all tokens; {way_out}, or write aggregation=weighted_sum"
        )
    part = next(part for part in objective.parts if part.teacher == i)
    teacher = SparseLogits(torch.zeros(1, layout.handed_bytes, dtype=torch.uint8), layout, places_in_row([1], 1))
    batch = collate([_sample_without_labels(config)])
    rows = batch.teachers[i]
    try:
        part.loss.plan(torch.zeros(1, 1, width), teacher, rows.student_side(batch.student), rows, 1.0)
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
