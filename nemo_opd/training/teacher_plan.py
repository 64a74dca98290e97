"""Projection between the student's and a teacher's vocabularies, and checks of tokenizer pairs (methods.md §4)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment.pieces import ADDED
from nemo_opd.config.model import Model
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.errors import AlignmentError, ModelError, ProjectionError
from nemo_opd.losses.learned_projection import NOTHING_PAIRED, learnable_pairs, learnable_rows
from nemo_opd.losses.pairs import TokenPairs
from nemo_opd.projection import Audit, ProjectionMatrix, audit, cached_projection
from nemo_opd.training.model_info import ModelInfo


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
        require_common_text(i, settings, student, teacher)
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


def require_common_text(i: int, settings: Teacher, student: ModelInfo, teacher: ModelInfo) -> None:
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
    has_other_template = config.data.messages_key is not None and ours != theirs
    if student.pieces.fingerprint == teacher.pieces.fingerprint and not has_other_template:
        raise ModelError(
            f"teachers.{i}.type=cross_tokenizer: {settings.name} has the student's tokenizer, so there is nothing to "
            "align; write type: same_tokenizer"
        )


def require_templates(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> None:
    """Raise AlignmentError, with the key, if the data are conversations and a model has no chat template.

    A teacher with the student's tokenizer and no context needs none: it reads the student's tokens.
    """
    for key, settings, info in template_readers(config, student, teachers):
        if not info.tokenizer.chat_template:
            name, source = settings.tokenizer_source
            raise AlignmentError(
                f"{key}.{name}={source} has no chat template, which conversations (data.messages_key) need; set "
                f"{key}.chat_template to a file with one, or {key}.tokenizer to the instruct model's tokenizer"
            )


def template_readers(
    config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> list[tuple[str, Model, ModelInfo]]:
    """Return section, settings and info of each model that renders conversations with its own chat template."""
    if config.data.messages_key is None:
        return []
    return [("student", config.student, student)] + [
        (f"teachers.{i}", settings, teacher)
        for i, (settings, teacher) in enumerate(zip(config.active_teachers, teachers, strict=True))
        if isinstance(settings, CrossTokenizerTeacher) or settings.context is not None
    ]
