"""The documents of an off-policy run, and the makers of samples from documents and rollouts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from nemo_opd.alignment import ChatRenderer, TokenAligner
from nemo_opd.alignment.chat import locate_tokens
from nemo_opd.alignment.chat_template import MARKS, learned_messages, plain_messages
from nemo_opd.config.data import LearnedTurns, Source
from nemo_opd.config.model import Model
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Context as ContextSettings
from nemo_opd.config.teacher import CrossTokenizerTeacher
from nemo_opd.data.columns import domain_column, has_contrast, run_layout
from nemo_opd.data.context import Context, PrivilegedPrompt
from nemo_opd.data.conversations import ChatSampleMaker
from nemo_opd.data.encoders import ChatEncoder, CrossTokenizer, Encoder
from nemo_opd.data.loader import Domains, TrainLoader, domains_of, made_of_all, validation_batches
from nemo_opd.data.order import BatchOrder, PackedOrder, State, lengths_of
from nemo_opd.data.rollouts import CrossTokenizerReader, CrossTokenizerText, RolloutSampleMaker
from nemo_opd.data.row_types import (
    MESSAGES,
    TEXT,
    Conversation,
    Document,
    Routed,
    holds_conversations,
    parsed,
    read_documents,
    read_rows,
    texts_hash,
)
from nemo_opd.data.sample_cache import CachedSampleMaker, CachedWindowMaker
from nemo_opd.data.samples import HasIdentity, Maker, SameTokenizer, Sample, SampleMaker, WindowMaker
from nemo_opd.data.text import TextSampleMaker, TextWindowMaker
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.preflight.model_info import ModelInfo
from nemo_opd.progress import tracked, working
from nemo_opd.types import Batch

if TYPE_CHECKING:
    from datasets import Dataset

_Reader = TypeVar("_Reader")
_IdentifiedReader = TypeVar("_IdentifiedReader", bound=HasIdentity)
_Made = TypeVar("_Made", Sample, tuple[Sample, ...])
_BLOCK_ROWS = 256
"""Documents read at a time: when looking for a conversation with an answer, usually the first has one."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation documents with the functions that turn them into samples."""

    train: Dataset
    validation: Dataset | None
    make_sample: SampleMaker
    make_validation_sample: SampleMaker
    make_windows: WindowMaker | None
    """Maker of the windows that fill rows; None if each training document is one sequence."""
    domains: Domains | None = None
    """Domains of the validation documents."""
    noun: ClassVar[str] = "documents"

    def loader(self, config: RunConfig) -> TrainLoader[Any]:
        """Open the training batches at their start."""
        workers = config.data.num_workers
        if self.make_windows is None:
            return TrainLoader(self.train, self.make_sample, self._order(config), workers)
        return TrainLoader(self.train, self.make_windows, self._packed_order(config), workers)

    def start(self, config: RunConfig) -> State:
        """Return the loader state of a run before its first batch."""
        return self.loader(config).state_dict()

    def steps(self, config: RunConfig) -> list[int]:
        """Return the number of optimizer steps of each epoch. With packing, this reads all documents.

        Raises DataError, with the row, for a document that cannot be read or used.
        """
        epochs = config.train.epochs or 1
        if self.make_windows is None:
            return [self._order(config).steps_per_epoch] * epochs
        documents = made_of_all(self.train, self.make_windows, config.data.num_workers)
        counted = tracked(documents, "counting the rows of an epoch", "documents", total=len(self.train))
        lengths = [lengths_of(windows) for windows in counted]
        order = self._packed_order(config)
        return [order.num_batches(epoch, lengths) for epoch in range(epochs)]

    @property
    def text_bytes(self) -> int:
        """Total bytes of the training texts."""
        import pyarrow.compute as pc

        return int(pc.sum(pc.binary_length(self.train.data.column(TEXT))).as_py())

    @property
    def validation_hash(self) -> str | None:
        """Hash of the validation texts; None without any."""
        if self.validation is None:
            return None
        starts = range(0, len(self.validation), _BLOCK_ROWS)
        blocks = (list(range(start, min(start + _BLOCK_ROWS, len(self.validation)))) for start in starts)
        return texts_hash(document for block in blocks for document in read_documents(self.validation, block))

    def _order(self, config: RunConfig) -> BatchOrder:
        return BatchOrder(len(self.train), config.train.global_batch_size, config.run.seed, config.data.shuffle)

    def _packed_order(self, config: RunConfig) -> PackedOrder:
        size, seed, shuffle = config.train.global_batch_size, config.run.seed, config.data.shuffle
        return PackedOrder(len(self.train), size, seed, shuffle, config.train.max_length)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all validation documents once, in order."""
        assert self.validation is not None
        return validation_batches(self.validation, self.make_validation_sample, batch_size, self.domains)


def load_corpus(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Corpus:
    """Load the documents. Raises DataError for unreadable or unusable documents."""
    is_chat = config.data.is_chat
    make_sample = make_validation_sample = build_sample_maker(config, student, teachers, is_chat=is_chat)
    if is_chat and not config.data.has_chat_validation:
        make_validation_sample = build_sample_maker(config, student, teachers, is_chat=False)
    with working("reading data.train"):
        train = _load_documents(config, config.data.train, "data.train")
    _require_answers(config, train, "data.train")
    _require_readable(make_sample, train)
    validation = None
    if config.data.validation.given:
        with working("reading data.validation"):
            validation = _load_documents(config, config.data.validation, "data.validation", is_validation=True)
        _require_answers(config, validation, "data.validation")
    make_windows = _build_window_maker(config, student, teachers) if config.packs_documents else None
    domains = None if validation is None else domains_of(validation, domain_column(config))
    return Corpus(train, validation, make_sample, make_validation_sample, make_windows, domains)


def _load_documents(config: RunConfig, source: Source, key: str, *, is_validation: bool = False) -> Dataset:
    from nemo_opd.data.document_sources import load_documents, with_others

    documents = load_documents(source, run_layout(config, is_validation=is_validation), key=key)
    return with_others(documents, key) if has_contrast(config) else documents


def _require_answers(config: RunConfig, documents: Dataset, key: str) -> None:
    """Raise DataError if conversations have no assistant message to learn; plain texts pass."""
    if not holds_conversations(documents.column_names):
        return
    roles: set[str] = set()
    turns = config.data.learned_turns
    for start in range(0, len(documents), _BLOCK_ROWS):
        rows = list(range(start, min(start + _BLOCK_ROWS, len(documents))))
        for messages in read_rows(documents, rows)[MESSAGES]:
            plain = plain_messages(parsed(messages))
            if any(learned_messages(plain, turns)):
                return
            roles |= {message["role"] for message in plain}
    if "assistant" in roles:
        why, way_out = (
            ("none has a mark", "mark the messages to learn with 1, or set data.learned_turns=all")
            if turns == "marked"
            else ("all are marked as not learned", "mark the messages to learn with 1, or remove the marks")
        )
        raise DataError(
            f"{key}: data.learned_turns={turns} selects none of the assistant's messages in {len(documents)} "
            f"conversations: {why} ({', '.join(MARKS)}); {way_out}"
        )
    answers = "add answers"
    if config.data.prompt_key is not None and config.data.completion_key is None:
        answers = "set data.completion_key to the column of answers"
    raise DataError(
        f"{key}: none of {len(documents)} conversations has an assistant message to learn (roles: "
        f"{', '.join(sorted(roles)) or 'none'}); {answers}, or let the student answer with rollout=hf"
    )


def _require_readable(make_sample: SampleMaker, documents: Dataset) -> None:
    """Build the first sample, to fail early. Raises DataError."""
    try:
        make_sample(read_documents(documents, [0])[0])
    except (AlignmentError, DataError) as error:
        raise DataError(f"data.train: the first document cannot be used: {error}") from error


def conversation_lengths(config: RunConfig, data: Corpus, student: ModelInfo, rows: Sequence[int]) -> tuple[int, ...]:
    """Return the numbers of the student's tokens in whole conversations: in these rows of `data.train`."""
    encoder = _chat_encoder(config.student, student, config.train.max_length, config.data.learned_turns)
    documents = read_documents(data.train, list(rows))
    contents = (document.content if isinstance(document, Routed) else document for document in documents)
    texts = (encoder.rendered(content).text for content in contents if isinstance(content, Conversation))
    return tuple(len(locate_tokens(encoder.tokenizer, text).ids) for text in texts)


def build_sample_maker(
    config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo], *, is_chat: bool
) -> SampleMaker:
    """Build the sample maker of conversations or texts."""
    make = _chat_sample_maker if is_chat else _text_sample_maker
    maker: SampleMaker = make(config, student, teachers)
    if config.data.cache:
        maker = CachedSampleMaker(maker)
    return maker if config.routing is None else _RoutedMaker(maker, config.active_names)


def _build_window_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> WindowMaker:
    """Build the window maker of packed texts."""
    maker: WindowMaker = TextWindowMaker(_text_sample_maker(config, student, teachers))
    if config.data.cache:
        maker = CachedWindowMaker(maker)
    return maker if config.routing is None else _RoutedMaker(maker, config.active_names)


def build_rollout_sample_maker(
    config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]
) -> RolloutSampleMaker:
    """Build the sample maker of rollouts."""

    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizerReader:
        if config.data.is_chat:
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

    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizer[Encoder]:
        teacher_encoder = encoder(teacher, teacher.longest_text(settings))
        return CrossTokenizer(teacher_encoder, _aligner(settings, student, teacher), settings.equal_history)

    return TextSampleMaker(encoder(student, config.train.max_length), _readers(config, student, teachers, reader))


def _chat_sample_maker(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> ChatSampleMaker:
    def reader(settings: CrossTokenizerTeacher, teacher: ModelInfo) -> CrossTokenizer[ChatEncoder]:
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
    columns = run_layout(config).columns

    def in_context(
        i: int, reader: _IdentifiedReader, context_settings: ContextSettings
    ) -> PrivilegedPrompt[_IdentifiedReader]:
        settings, info = config.active_teachers[i], teachers[i]
        fields = {name: columns[name] for name in context_settings.fields}
        context = Context(context_settings, fields, f"teachers.{i}.context")
        renderer = None
        if config.data.is_chat:
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
) -> CrossTokenizer[ChatEncoder]:
    encoder = _chat_encoder(settings, teacher, teacher.longest_text(settings), turns)
    return CrossTokenizer(encoder, _aligner(settings, student, teacher), settings.equal_history)


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


class _RoutedMaker(Generic[_Made]):
    """A maker for routed documents; samples that `make` caches do not depend on the teacher."""

    def __init__(self, make: Maker[_Made], teachers: Sequence[str]) -> None:
        self._make: Maker[_Made] = make
        self._teachers = tuple(teachers)
        self.identity = f"routed {self._teachers} {make.identity}"

    def __call__(self, document: Document) -> _Made:
        assert isinstance(document, Routed)
        # `require_content` has rejected data with unknown teachers.
        made, teacher = self._make(document.content), self._teachers.index(document.teacher)
        if isinstance(made, Sample):
            return replace(made, route=teacher)
        return tuple(replace(sample, route=teacher) for sample in made)
