"""Builders of sample makers: functions from a document or rollout to a sample with every teacher's tokens."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from nemo_opd.aggregation.routed import RoutedSampleMaker, RoutedWindowMaker
from nemo_opd.alignment import ChatRenderer, TokenAligner
from nemo_opd.config.context import Context as ContextSettings
from nemo_opd.config.data import LearnedTurns
from nemo_opd.config.model import Model
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher
from nemo_opd.data.cache import CachedSampleMaker, CachedWindowMaker
from nemo_opd.data.chat import ChatSampleMaker, CrossTokenizerChat
from nemo_opd.data.context import Context
from nemo_opd.data.encoders import ChatEncoder, Encoder
from nemo_opd.data.in_context import PrivilegedPrompt
from nemo_opd.data.rollouts import CrossTokenizerReader, CrossTokenizerText, RolloutSampleMaker
from nemo_opd.data.samples import HasIdentity, SameTokenizer, SampleMaker, WindowMaker
from nemo_opd.data.text import CrossTokenizer, TextSampleMaker, TextWindowMaker
from nemo_opd.training.inputs import layout_of
from nemo_opd.training.model_info import ModelInfo

_Reader = TypeVar("_Reader")
_IdentifiedReader = TypeVar("_IdentifiedReader", bound=HasIdentity)


def build_sample_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> SampleMaker:
    """Build the sample maker of documents."""
    make = _text_sample_maker if config.data.messages_key is None else _chat_sample_maker
    maker: SampleMaker = make(config, student, teachers)
    if config.data.cache:
        maker = CachedSampleMaker(maker)
    return maker if config.routing is None else RoutedSampleMaker(maker, config.active_names)


def build_window_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> WindowMaker:
    """Build the window maker of packed texts."""
    maker: WindowMaker = TextWindowMaker(_text_sample_maker(config, student, teachers))
    if config.data.cache:
        maker = CachedWindowMaker(maker)
    return maker if config.routing is None else RoutedWindowMaker(maker, config.active_names)


def row_limits(config: RunConfig, teachers: Sequence[ModelInfo]) -> tuple[int, ...]:
    """Return the most tokens of a packed row: the student's, then one limit per active teacher."""
    max_length = config.train.max_length
    return max_length, *(
        teacher.longest_text(settings) if isinstance(settings, CrossTokenizerTeacher) else max_length
        for settings, teacher in zip(config.active_teachers, teachers, strict=True)
    )


def build_rollout_sample_maker(
    config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> RolloutSampleMaker:
    """Build the sample maker of rollouts."""

    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizerReader:
        if config.data.messages_key is not None:
            return _chat_reader(settings, student, teacher)
        length, aligner = teacher.longest_text(settings), _aligner(settings, student, teacher)
        return CrossTokenizerText.of(teacher.tokenizer, length, aligner, teacher.vocab_size, settings.equal_history)

    lengths = student.pieces.lengths[: student.vocab_size]
    readers = _readers(config, student, teachers, reader)
    return RolloutSampleMaker(lengths, _add_contexts(config, teachers, readers))


def _text_sample_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> TextSampleMaker:
    def encoder(info: ModelInfo, max_length: int) -> Encoder:
        data = config.data
        return Encoder.of(
            info.tokenizer,
            max_length,
            data.append_eos,
            info.vocab_size,
            reads_special=data.special_tokens == "read",
        )

    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizer:
        teacher_encoder = encoder(teacher, teacher.longest_text(settings))
        return CrossTokenizer(teacher_encoder, _aligner(settings, student, teacher), settings.equal_history)

    return TextSampleMaker(encoder(student, config.train.max_length), _readers(config, student, teachers, reader))


def _chat_sample_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> ChatSampleMaker:
    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizerChat:
        return _chat_reader(settings, student, teacher, config.data.learned_turns)

    encoder = _chat_encoder(config.student, student, config.train.max_length, config.data.learned_turns)
    return ChatSampleMaker(encoder, _add_contexts(config, teachers, _readers(config, student, teachers, reader)))


def _readers(
    config: RunConfig,
    student: ModelInfo,
    teachers: Sequence[ModelInfo],
    cross_tokenizer: Callable[[CrossTokenizerTeacher, ModelInfo], _Reader],
) -> tuple[SameTokenizer | _Reader, ...]:
    """Return each active teacher's reader. Raises AlignmentError if a tokenizer cannot be aligned."""
    return tuple(
        cross_tokenizer(settings, teachers[i])
        if isinstance(settings, CrossTokenizerTeacher)
        else _same_tokenizer(config, i, student, teachers)
        for i, settings in enumerate(config.active_teachers)
    )


def _add_contexts(
    config: RunConfig, teachers: Sequence[ModelInfo], readers: Sequence[_IdentifiedReader]
) -> tuple[_IdentifiedReader | PrivilegedPrompt[_IdentifiedReader], ...]:
    """Wrap the readers of those active teachers that have a context."""
    columns = layout_of(config).columns

    def in_context(
        i: int, reader: _IdentifiedReader, context_settings: ContextSettings
    ) -> PrivilegedPrompt[_IdentifiedReader]:
        settings, info = config.active_teachers[i], teachers[i]
        fields = {name: columns[name] for name in context_settings.fields}
        context = Context(context_settings, fields, f"teachers.{i}.context")
        renderer = None
        if config.data.messages_key is not None:
            renderer = ChatRenderer(info.tokenizer, template_kwargs=settings.chat_template_kwargs)
        return PrivilegedPrompt(reader, context, info.tokenizer, renderer, info.vocab_size, info.longest_text(settings))

    contexts = [teacher.context for teacher in config.active_teachers]
    return tuple(
        reader if context is None else in_context(i, reader, context)
        for i, (reader, context) in enumerate(zip(readers, contexts, strict=True))
    )


def _chat_encoder(settings: Model, info: ModelInfo, max_length: int, turns: LearnedTurns) -> ChatEncoder:
    return ChatEncoder.of(info.tokenizer, max_length, settings.chat_template_kwargs, info.vocab_size, turns)


def _chat_reader(
    settings: CrossTokenizerTeacher, student: ModelInfo, teacher: ModelInfo, turns: LearnedTurns = "all"
) -> CrossTokenizerChat:
    encoder = _chat_encoder(settings, teacher, teacher.longest_text(settings), turns)
    return CrossTokenizerChat(encoder, _aligner(settings, student, teacher), settings.equal_history)


def _aligner(settings: CrossTokenizerTeacher, student: ModelInfo, teacher: ModelInfo) -> TokenAligner:
    return TokenAligner(student.tokenizer, teacher.tokenizer, roles=settings.roles_by_token)


def _same_tokenizer(config: RunConfig, i: int, student: ModelInfo, teachers: Sequence[ModelInfo]) -> SameTokenizer:
    """Return teacher i's reader of the student's ids.

    With averaged logits, an id that one teacher lacks is missing for all, so that they score the same tokens.
    """
    scoring_together = teachers if config.aggregation.type == "averaged_logits" else teachers[i : i + 1]
    missing = {int(index) for teacher in scoring_together for index in student.ids_missing_in(teacher)}
    tokenizer = teachers[i].tokenizer
    candidates = (index for index in (tokenizer.unk_token_id, tokenizer.pad_token_id, 0) if index is not None)
    readable = (index for index in candidates if index < teachers[i].vocab_size and index not in missing)
    return SameTokenizer(tuple(sorted(missing)), next(readable, 0))
