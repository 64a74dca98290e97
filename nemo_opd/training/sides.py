"""Each model with its tokenizer, and what lies between the student's and a teacher's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import TokenAligner, pieces_of
from nemo_opd.alignment.pieces import HOLE
from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.samples import CrossTokenizer, Encoder, SameTokenizer, SampleMaker
from nemo_opd.errors import ModelError, ProjectionError
from nemo_opd.models.load import load_config, load_tokenizer
from nemo_opd.projection import ProjectionMatrix, audit, cached_projection
from nemo_opd.training.memory import ModelSize, model_size
from nemo_opd.training.plan import TeacherPlan


@dataclass(frozen=True, slots=True)
class Side:
    size: ModelSize
    tokenizer: PreTrainedTokenizerFast
    vocab_size: int
    """Ids that the tokenizer has and the model can read."""


def load_side(settings: Student | Teacher, key: str) -> Side:
    """Raises ModelError where the model or its tokenizer is not readable, or the two do not belong together."""
    size = model_size(load_config(settings.model, key=f"{key}.model"))
    source, source_key = settings.tokenizer or settings.model, f"{key}.{'tokenizer' if settings.tokenizer else 'model'}"
    tokenizer = load_tokenizer(source, key=source_key)
    pieces = pieces_of(tokenizer)
    # Special tokens may go beyond: Gemma-3-1B has the tokenizer of its siblings that see, without their image token.
    beyond = slice(size.vocab_size, None)
    if not np.all(pieces.is_special[beyond] | (pieces.origin[beyond] == HOLE)):
        raise ModelError(
            f"{source_key}={source}: its tokenizer has ids up to {pieces.vocab_size - 1}, but {settings.model} has "
            f"{size.vocab_size} token embeddings; name the tokenizer of the model as {key}.tokenizer"
        )
    return Side(size, tokenizer, min(pieces.vocab_size, size.vocab_size))


def plan_teacher(i: int, settings: Teacher, student: Side, teacher: Side) -> TeacherPlan:
    """Raises ModelError or ProjectionError where the teacher does not fit the student."""
    if not isinstance(settings, CrossTokenizerTeacher):
        require_same_tokenizer(i, settings, student.tokenizer, teacher.tokenizer)
        require_room_for_ids(i, settings, student, teacher)
        return TeacherPlan(teacher.vocab_size, None, None)
    matrix = load_projection(i, settings, student.tokenizer, teacher.tokenizer)
    return TeacherPlan(teacher.vocab_size, matrix, audit(student.tokenizer, teacher.tokenizer, matrix))


def load_projection(
    i: int, settings: CrossTokenizerTeacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> ProjectionMatrix:
    """Raises ProjectionError naming the key where the file given is not of this pair or not readable."""
    if settings.projection == "auto":
        matrix, _ = cached_projection(student, tokenizer, settings.top_k)
        return matrix
    try:
        return ProjectionMatrix.load(settings.projection, student_tokenizer=student, teacher_tokenizer=tokenizer)
    except ProjectionError as error:
        raise ProjectionError(f"teachers.{i}.projection: {error}") from error


def require_same_tokenizer(
    i: int, settings: Teacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Raises ModelError where a token of both has two ids, or an id of both is two tokens."""
    ours, theirs = student.get_vocab(), tokenizer.get_vocab()
    by_id = {index: token for token, index in theirs.items()}
    differing = [
        f"{token!r} is {index} and {theirs[token]}" if token in theirs else f"{index} is {token!r} and {by_id[index]!r}"
        for token, index in sorted(ours.items(), key=lambda item: item[1])
        if theirs.get(token, index) != index or by_id.get(index, token) != token
    ]
    if differing:
        raise ModelError(
            f"teachers.{i}.type=same_tokenizer: the tokenizer of {settings.name} differs from the student's in "
            f"{len(differing)} of {len(ours)} tokens ({'; '.join(differing[:2])}); write type: cross_tokenizer"
        )


def require_room_for_ids(i: int, settings: Teacher, student: Side, teacher: Side) -> None:
    """Raises ModelError where the student's tokenizer has ids that the teacher cannot read."""
    if student.vocab_size > teacher.size.vocab_size:
        raise ModelError(
            f"teachers.{i}.type=same_tokenizer: {settings.name} has {teacher.size.vocab_size} token embeddings, but "
            f"the student's tokenizer has ids up to {student.vocab_size - 1}; write type: cross_tokenizer"
        )


def build_sample_maker(config: RunConfig, student: Side, teachers: Sequence[Side]) -> SampleMaker:
    def encoder(side: Side, max_length: int) -> Encoder:
        return Encoder.of(side.tokenizer, max_length, config.data.append_eos, side.vocab_size)

    def reader(settings: Teacher, side: Side) -> SameTokenizer | CrossTokenizer:
        if not isinstance(settings, CrossTokenizerTeacher):
            return SameTokenizer()
        max_length = settings.max_length or config.train.max_length
        return CrossTokenizer(encoder(side, max_length), TokenAligner(student.tokenizer, side.tokenizer))

    readers = tuple(map(reader, config.active_teachers, teachers))
    return SampleMaker(encoder(student, config.train.max_length), readers)
