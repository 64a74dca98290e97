"""The documents of an off-policy run."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pyarrow.compute as pc
from datasets import Dataset

from nemo_opd.alignment.chat_messages import MARKS, learned_messages, plain_messages
from nemo_opd.config.data import Source
from nemo_opd.config.run import RunConfig
from nemo_opd.data.contrast import with_others
from nemo_opd.data.documents import MESSAGES, TEXT, parsed, read_documents, read_rows
from nemo_opd.data.domains import Domains, domains_of
from nemo_opd.data.loader import TrainLoader, made_of_all, validation_batches
from nemo_opd.data.order import BatchOrder, State
from nemo_opd.data.packed_order import PackedOrder, lengths_of
from nemo_opd.data.samples import SampleMaker, WindowMaker
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.progress import tracked, working
from nemo_opd.training.inputs import domain_column, has_contrast, layout_of
from nemo_opd.training.model_info import ModelInfo
from nemo_opd.training.sample_makers import build_sample_maker, build_window_maker, row_limits
from nemo_opd.types import Batch

_BLOCK_ROWS = 256
"""Conversations read at a time when looking for one with an answer; usually the first has one."""


@dataclass(frozen=True, slots=True)
class Packed:
    """Packing of training documents into rows of windows."""

    make: WindowMaker
    limits: tuple[int, ...]
    """Maximum row length in tokens for the student and each active teacher."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation documents with the functions that turn them into samples."""

    train: Dataset
    validation: Dataset | None
    make_sample: SampleMaker
    packed: Packed | None
    """None if each training document is one sequence."""
    domains: Domains | None = None
    """Domains of the validation documents."""
    noun: ClassVar[str] = "documents"

    def loader(self, config: RunConfig) -> TrainLoader[Any]:
        """Open the training batches at their start."""
        workers = config.data.num_workers
        if self.packed is None:
            return TrainLoader(self.train, self.make_sample, self._order(config), workers)
        return TrainLoader(self.train, self.packed.make, self._packed_order(config, self.packed), workers)

    def start(self, config: RunConfig) -> State:
        """Return the loader state of a run before its first batch."""
        return self.loader(config).state_dict()

    def steps(self, config: RunConfig) -> list[int]:
        """Return the number of optimizer steps of each epoch. With packing, this reads all documents.

        Raises DataError, with the row, for a document that cannot be read or used.
        """
        epochs = config.train.epochs or 1
        if self.packed is None:
            return [self._order(config).steps_per_epoch] * epochs
        documents = made_of_all(self.train, self.packed.make, config.data.num_workers)
        counted = tracked(documents, "counting the rows of an epoch", "documents", total=len(self.train))
        lengths = [lengths_of(windows) for windows in counted]
        order = self._packed_order(config, self.packed)
        return [order.num_batches(epoch, lengths) for epoch in range(epochs)]

    @property
    def text_bytes(self) -> int:
        """Total bytes of the training texts."""
        return int(pc.sum(pc.binary_length(self.train.data.column(TEXT))).as_py())

    def _order(self, config: RunConfig) -> BatchOrder:
        return BatchOrder(len(self.train), config.train.global_batch_size, config.run.seed, config.data.shuffle)

    def _packed_order(self, config: RunConfig, packed: Packed) -> PackedOrder:
        size, seed, shuffle = config.train.global_batch_size, config.run.seed, config.data.shuffle
        return PackedOrder(len(self.train), size, seed, shuffle, packed.limits)

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all validation documents once, in order."""
        assert self.validation is not None
        return validation_batches(self.validation, self.make_sample, batch_size, self.domains)


def load_corpus(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Corpus:
    """Load the documents. Raises DataError for unreadable or unusable documents."""
    make_sample = build_sample_maker(config, student, teachers)
    with working("reading data.train"):
        train = _load(config, config.data.train, "data.train")
    _require_answers(config, train, "data.train")
    _require_readable(make_sample, train)
    validation = None
    if config.data.validation.given:
        with working("reading data.validation"):
            validation = _load(config, config.data.validation, "data.validation", is_validation=True)
        _require_answers(config, validation, "data.validation")
    packed = None
    if config.packs_documents:
        packed = Packed(build_window_maker(config, student, teachers), row_limits(config, teachers))
    domains = None if validation is None else domains_of(validation, domain_column(config))
    return Corpus(train, validation, make_sample, packed, domains)


def _load(config: RunConfig, source: Source, key: str, *, is_validation: bool = False) -> Dataset:
    documents = load_documents(source, layout_of(config, is_validation=is_validation), key=key)
    return with_others(documents, key) if has_contrast(config) else documents


def _require_answers(config: RunConfig, documents: Dataset, key: str) -> None:
    """Raise DataError if conversations have no assistant message to learn; plain texts pass."""
    if MESSAGES not in documents.column_names:
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
    raise DataError(
        f"{key}: none of {len(documents)} conversations has an assistant message to learn (roles: "
        f"{', '.join(sorted(roles)) or 'none'}); add answers, or let the student answer with rollout=hf"
    )


def _require_readable(make_sample: SampleMaker, documents: Dataset) -> None:
    """Build the first sample, to fail early. Raises DataError."""
    try:
        make_sample(read_documents(documents, [0])[0])
    except (AlignmentError, DataError) as error:
        raise DataError(f"data.train: the first document cannot be used: {error}") from error
