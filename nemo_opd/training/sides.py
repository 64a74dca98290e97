"""Each model with its tokenizer, and what lies between the student's and a teacher's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import Pieces, TokenAligner, pieces_of
from nemo_opd.alignment.pieces import HOLE
from nemo_opd.config.model import Model, Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.cache import CachedSampleMaker
from nemo_opd.data.chat import ChatEncoder, ChatSampleMaker, CrossTokenizerChat
from nemo_opd.data.samples import SameTokenizer, SampleMaker
from nemo_opd.data.text import CrossTokenizer, Encoder, TextSampleMaker
from nemo_opd.errors import ModelError, ProjectionError
from nemo_opd.models.load import load_config, tokenizer_of
from nemo_opd.models.lora import Adapters
from nemo_opd.models.parallelize import check_parallelism
from nemo_opd.projection import Audit, ProjectionMatrix, audit, cached_projection
from nemo_opd.training.memory import ModelSize, model_size


@dataclass(frozen=True, slots=True)
class Side:
    size: ModelSize
    tokenizer: PreTrainedTokenizerFast
    pieces: Pieces
    vocab_size: int
    """Ids that the tokenizer has and the model can read."""


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    vocab_size: int
    projection: ProjectionMatrix | None
    """None where the teacher shares the student's tokenizer."""
    audit: Audit | None


def load_side(settings: Student | Teacher, key: str, device: str) -> Side:
    """Raises ModelError where the model or its tokenizer is not readable, the two do not belong together, or the model
    cannot be cut as its `parallelism` says.
    """
    config = load_config(settings.model, key=f"{key}.model")
    check_parallelism(config, settings.parallelism, device, key=key)
    lora = settings.lora if isinstance(settings, Student) else None
    adapters = None if lora is None else Adapters(lora, settings.model, seed=0)
    size = model_size(config, adapters)
    tokenizer = tokenizer_of(settings, key=key)
    pieces = pieces_of(tokenizer)
    # Special tokens may go beyond: Gemma-3-1B has the tokenizer of its siblings that see, without their image token.
    beyond = slice(size.vocab_size, None)
    if not np.all(pieces.is_special[beyond] | (pieces.origin[beyond] == HOLE)):
        name, source = settings.tokenizer_source
        raise ModelError(
            f"{key}.{name}={source}: its tokenizer has ids up to {pieces.vocab_size - 1}, but {settings.model} has "
            f"{size.vocab_size} token embeddings; name the tokenizer of the model as {key}.tokenizer"
        )
    return Side(size, tokenizer, pieces, min(pieces.vocab_size, size.vocab_size))


def plan_teacher(i: int, settings: Teacher, student: Side, teacher: Side) -> TeacherPlan:
    """Raises ModelError or ProjectionError where the teacher does not fit the student."""
    if not isinstance(settings, CrossTokenizerTeacher):
        require_same_tokenizer(i, settings, student.tokenizer, teacher.tokenizer)
        require_room_for_ids(i, settings, student, teacher)
        return TeacherPlan(teacher.vocab_size, None, None)
    require_other_tokenizer(i, settings, student, teacher)
    matrix = load_projection(i, settings, student.tokenizer, teacher.tokenizer)
    return TeacherPlan(teacher.vocab_size, matrix, audit(student.tokenizer, teacher.tokenizer, matrix))


def load_projection(
    i: int, settings: CrossTokenizerTeacher, student: PreTrainedTokenizerFast, tokenizer: PreTrainedTokenizerFast
) -> ProjectionMatrix:
    """Raises ProjectionError naming the key where the file given is not of this pair or not readable."""
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


def require_other_tokenizer(i: int, settings: Teacher, student: Side, teacher: Side) -> None:
    """Raises ModelError where alignment and projection would be the identity."""
    if student.pieces.fingerprint == teacher.pieces.fingerprint:
        raise ModelError(
            f"teachers.{i}.type=cross_tokenizer: {settings.name} has the student's tokenizer, so there is nothing to "
            "align; write type: same_tokenizer"
        )


def require_room_for_ids(i: int, settings: Teacher, student: Side, teacher: Side) -> None:
    """Raises ModelError where the student's tokenizer has ids that the teacher cannot read."""
    if student.vocab_size > teacher.size.vocab_size:
        raise ModelError(
            f"teachers.{i}.type=same_tokenizer: {settings.name} has {teacher.size.vocab_size} token embeddings, but "
            f"the student's tokenizer has ids up to {student.vocab_size - 1}; write type: cross_tokenizer"
        )


def build_sample_maker(config: RunConfig, student: Side, teachers: Sequence[Side]) -> SampleMaker:
    """Raises AlignmentError where a conversation needs a chat template and a side has none."""
    make = chat_sample_maker if config.data.messages_key is not None else text_sample_maker
    maker = make(config, student, teachers)
    return CachedSampleMaker(maker) if config.data.cache else maker


def text_sample_maker(config: RunConfig, student: Side, teachers: Sequence[Side]) -> TextSampleMaker:
    def encoder(side: Side, max_length: int) -> Encoder:
        return Encoder.of(side.tokenizer, max_length, config.data.append_eos, side.vocab_size)

    def reader(settings: Teacher, side: Side) -> SameTokenizer | CrossTokenizer:
        if not isinstance(settings, CrossTokenizerTeacher):
            return SameTokenizer()
        own = encoder(side, longest(config, settings))
        return CrossTokenizer(own, aligner(settings, student, side), settings.equal_history)

    readers = tuple(map(reader, config.active_teachers, teachers))
    return TextSampleMaker(encoder(student, config.train.max_length), readers)


def chat_sample_maker(config: RunConfig, student: Side, teachers: Sequence[Side]) -> ChatSampleMaker:
    def encoder(settings: Model, side: Side, max_length: int) -> ChatEncoder:
        return ChatEncoder.of(side.tokenizer, max_length, settings.chat_template_kwargs, side.vocab_size)

    def reader(settings: Teacher, side: Side) -> SameTokenizer | CrossTokenizerChat:
        if not isinstance(settings, CrossTokenizerTeacher):
            return SameTokenizer()
        own = encoder(settings, side, longest(config, settings))
        return CrossTokenizerChat(own, aligner(settings, student, side), settings.equal_history)

    readers = tuple(map(reader, config.active_teachers, teachers))
    return ChatSampleMaker(encoder(config.student, student, config.train.max_length), readers)


def longest(config: RunConfig, teacher: CrossTokenizerTeacher) -> int:
    return teacher.max_length or config.train.max_length


def aligner(teacher: CrossTokenizerTeacher, student: Side, side: Side) -> TokenAligner:
    return TokenAligner(student.tokenizer, side.tokenizer, roles=teacher.roles_by_token)
