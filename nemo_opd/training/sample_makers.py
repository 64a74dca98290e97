"""Functions from a document or a rollout to a sample, with each teacher's reader of it."""

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
from nemo_opd.data.in_context import InContext
from nemo_opd.data.rollouts import CrossTokenizerReader, CrossTokenizerText, RolloutSampleMaker
from nemo_opd.data.samples import HasIdentity, SameTokenizer, SampleMaker, WindowMaker
from nemo_opd.data.text import CrossTokenizer, TextSampleMaker, TextWindowMaker
from nemo_opd.training.inputs import layout_of
from nemo_opd.training.model_info import ModelInfo

_Reader = TypeVar("_Reader")
_Read = TypeVar("_Read", bound=HasIdentity)


def build_sample_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> SampleMaker:
    """Build the sample maker of documents."""
    make = _text_sample_maker if config.data.messages_key is None else _chat_sample_maker
    maker: SampleMaker = make(config, student, teachers)
    if config.data.cache:
        maker = CachedSampleMaker(maker)
    return maker if config.routing is None else RoutedSampleMaker(maker, config.active_names)


def build_window_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> WindowMaker:
    """Build the window maker of texts."""
    maker: WindowMaker = TextWindowMaker(_text_sample_maker(config, student, teachers))
    if config.data.cache:
        maker = CachedWindowMaker(maker)
    return maker if config.routing is None else RoutedWindowMaker(maker, config.active_names)


def row_limits(config: RunConfig, teachers: Sequence[ModelInfo]) -> tuple[int, ...]:
    """Return the tokens of a row for the student and for each active teacher."""
    own = config.train.max_length
    return own, *(
        teacher.longest_text(settings) if isinstance(settings, CrossTokenizerTeacher) else own
        for settings, teacher in zip(config.active_teachers, teachers, strict=True)
    )


def build_rollout_sample_maker(
    config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> RolloutSampleMaker:
    """Build the sample maker of sequences that the student samples."""

    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizerReader:
        if config.data.messages_key is not None:
            return _chat_reader(settings, student, teacher)
        length, aligner = teacher.longest_text(settings), _aligner(settings, student, teacher)
        return CrossTokenizerText.of(teacher.tokenizer, length, aligner, teacher.vocab_size, settings.equal_history)

    lengths = student.pieces.lengths[: student.vocab_size]
    readers = _readers(config, student, teachers, reader)
    return RolloutSampleMaker(lengths, _in_contexts(config, teachers, readers))


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
        own = encoder(teacher, teacher.longest_text(settings))
        return CrossTokenizer(own, _aligner(settings, student, teacher), settings.equal_history)

    return TextSampleMaker(encoder(student, config.train.max_length), _readers(config, student, teachers, reader))


def _chat_sample_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> ChatSampleMaker:
    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizerChat:
        return _chat_reader(settings, student, teacher, config.data.learned_turns)

    encoder = _chat_encoder(config.student, student, config.train.max_length, config.data.learned_turns)
    return ChatSampleMaker(encoder, _in_contexts(config, teachers, _readers(config, student, teachers, reader)))


def _readers(
    config: RunConfig,
    student: ModelInfo,
    teachers: Sequence[ModelInfo],
    cross_tokenizer: Callable[[CrossTokenizerTeacher, ModelInfo], _Reader],
) -> tuple[SameTokenizer | _Reader, ...]:
    """Return each active teacher's reader. Raises AlignmentError for a tokenizer that cannot be aligned."""
    return tuple(
        cross_tokenizer(settings, teachers[i])
        if isinstance(settings, CrossTokenizerTeacher)
        else _same_tokenizer(config, i, student, teachers)
        for i, settings in enumerate(config.active_teachers)
    )


def _in_contexts(
    config: RunConfig, teachers: Sequence[ModelInfo], readers: Sequence[_Read]
) -> tuple[_Read | InContext[_Read], ...]:
    """Return the readers of the active teachers with the contexts that some have."""
    columns = layout_of(config).columns

    def in_context(i: int, reader: _Read, settings: ContextSettings) -> InContext[_Read]:
        own, info = config.active_teachers[i], teachers[i]
        context = Context(settings, {name: columns[name] for name in settings.fields}, f"teachers.{i}.context")
        renderer = None
        if config.data.messages_key is not None:
            renderer = ChatRenderer(info.tokenizer, template_kwargs=own.chat_template_kwargs)
        return InContext(reader, context, info.tokenizer, renderer, info.vocab_size, info.longest_text(own))

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
    """Return teacher i's reader of the student's ids; teachers whose logits are averaged score the same tokens."""
    together = teachers if config.aggregation.type == "averaged_logits" else teachers[i : i + 1]
    ids = {int(index) for teacher in together for index in student.ids_missing_in(teacher)}
    own = teachers[i].tokenizer
    known = (own.unk_token_id, own.pad_token_id, 0)
    readable = (index for index in known if index is not None and index < teachers[i].vocab_size and index not in ids)
    return SameTokenizer(tuple(sorted(ids)), next(readable, 0))
