"""Each model with its tokenizer, and what lies between the student's and a teacher's."""

from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from nemo_opd.alignment import TokenAligner
from nemo_opd.config.model import Model
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.data.cache import CachedSampleMaker
from nemo_opd.data.chat import ChatSampleMaker, CrossTokenizerChat
from nemo_opd.data.encoders import ChatEncoder, Encoder
from nemo_opd.data.samples import SameTokenizer, SampleMaker
from nemo_opd.data.text import CrossTokenizer, TextSampleMaker
from nemo_opd.errors import AlignmentError, ModelError, ProjectionError
from nemo_opd.projection import Audit, ProjectionMatrix, audit, cached_projection
from nemo_opd.training.same_tokenizer import require_common_text, require_same_tokenizer, same_tokenizer_reader
from nemo_opd.training.side import Side

NO_LIMIT = 1 << 30
"""Tokens; more than any text has."""


@dataclass(frozen=True, slots=True)
class TeacherPlan:
    vocab_size: int
    projection: ProjectionMatrix | None
    """None where the teacher shares the student's tokenizer."""
    audit: Audit | None


def plan_teacher(config: RunConfig, i: int, student: Side, teacher: Side) -> TeacherPlan:
    """Raises ModelError or ProjectionError where the teacher does not fit the student."""
    settings = config.active_teachers[i]
    if not isinstance(settings, CrossTokenizerTeacher):
        require_same_tokenizer(i, settings, student.tokenizer, teacher.tokenizer)
        require_common_text(i, settings, student, teacher)
        return TeacherPlan(teacher.vocab_size, None, None)
    require_other_text(config, i, student, teacher)
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


def require_other_text(config: RunConfig, i: int, student: Side, teacher: Side) -> None:
    """Raises ModelError where the teacher would read the student's own ids: alignment and projection would be the
    identity. With the same tokenizer it may still read conversations in another template.
    """
    settings = config.active_teachers[i]
    if student.pieces.fingerprint == teacher.pieces.fingerprint and not writes_otherwise(config, i, student, teacher):
        raise ModelError(
            f"teachers.{i}.type=cross_tokenizer: {settings.name} has the student's tokenizer, so there is nothing to "
            "align; write type: same_tokenizer"
        )


def writes_otherwise(config: RunConfig, i: int, student: Side, teacher: Side) -> bool:
    """Whether a teacher renders conversations in another way than the student."""
    ours, theirs = (
        (side.tokenizer.chat_template, settings.chat_template_kwargs)
        for side, settings in ((student, config.student), (teacher, config.active_teachers[i]))
    )
    return config.data.messages_key is not None and ours != theirs


def require_templates(config: RunConfig, student: Side, teachers: Sequence[Side]) -> None:
    """Raises AlignmentError, naming the key, where conversations need a chat template and a side has none.

    A teacher with the student's tokenizer reads what the student's template writes.
    """
    if config.data.messages_key is None:
        return
    asked = [("student", config.student, student)] + [
        (f"teachers.{i}", settings, side)
        for i, (settings, side) in enumerate(zip(config.active_teachers, teachers, strict=True))
        if isinstance(settings, CrossTokenizerTeacher)
    ]
    for key, settings, side in asked:
        if not side.tokenizer.chat_template:
            name, source = settings.tokenizer_source
            raise AlignmentError(
                f"{key}.{name}={source} has no chat template, which conversations (data.messages_key) need; name a "
                f"file with one as {key}.chat_template, or the instruct model's tokenizer as {key}.tokenizer"
            )


def build_sample_maker(config: RunConfig, student: Side, teachers: Sequence[Side]) -> SampleMaker:
    """Raises AlignmentError where a conversation needs a chat template and a side has none."""
    make = chat_sample_maker if config.data.messages_key is not None else text_sample_maker
    maker = make(config, student, teachers)
    return CachedSampleMaker(maker) if config.data.cache else maker


def text_sample_maker(config: RunConfig, student: Side, teachers: Sequence[Side]) -> TextSampleMaker:
    def encoder(side: Side, max_length: int) -> Encoder:
        return Encoder.of(side.tokenizer, max_length, config.data.append_eos, side.vocab_size)

    def reader(i: int, settings: Teacher) -> SameTokenizer | CrossTokenizer:
        if not isinstance(settings, CrossTokenizerTeacher):
            return same_tokenizer_reader(config, i, student, teachers)
        own = encoder(teachers[i], longest(settings, teachers[i]))
        return CrossTokenizer(own, aligner(settings, student, teachers[i]), settings.equal_history)

    readers = tuple(reader(i, settings) for i, settings in enumerate(config.active_teachers))
    return TextSampleMaker(encoder(student, config.train.max_length), readers)


def chat_sample_maker(config: RunConfig, student: Side, teachers: Sequence[Side]) -> ChatSampleMaker:
    def encoder(settings: Model, side: Side, max_length: int) -> ChatEncoder:
        return ChatEncoder.of(side.tokenizer, max_length, settings.chat_template_kwargs, side.vocab_size)

    def reader(i: int, settings: Teacher) -> SameTokenizer | CrossTokenizerChat:
        if not isinstance(settings, CrossTokenizerTeacher):
            return same_tokenizer_reader(config, i, student, teachers)
        own = encoder(settings, teachers[i], longest(settings, teachers[i]))
        return CrossTokenizerChat(own, aligner(settings, student, teachers[i]), settings.equal_history)

    readers = tuple(reader(i, settings) for i, settings in enumerate(config.active_teachers))
    return ChatSampleMaker(encoder(config.student, student, config.train.max_length), readers)


def longest(teacher: CrossTokenizerTeacher, side: Side) -> int:
    """Tokens of a text that the teacher reads at most: what it is told, else what its model is made for."""
    return teacher.max_length or side.positions or NO_LIMIT


def aligner(teacher: CrossTokenizerTeacher, student: Side, side: Side) -> TokenAligner:
    return TokenAligner(student.tokenizer, side.tokenizer, roles=teacher.roles_by_token)
