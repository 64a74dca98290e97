"""The texts of an off-policy run, as student and teachers see them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from datasets import Dataset

from nemo_opd.aggregation.routed import RoutedSampleMaker
from nemo_opd.config.run import RunConfig
from nemo_opd.data.documents import MESSAGES, parsed, read_documents
from nemo_opd.data.loader import validation_batches
from nemo_opd.data.samples import SampleMaker
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.progress import working
from nemo_opd.training.columns import layout_of
from nemo_opd.training.side import Side
from nemo_opd.training.sides import build_sample_maker
from nemo_opd.types import Batch

ROWS_AT_A_TIME = 256
"""Of conversations, until one has an answer; the first of them as a rule."""


@dataclass(frozen=True, slots=True)
class Corpus:
    train: Dataset
    validation: Dataset | None
    make_sample: SampleMaker
    noun: ClassVar[str] = "documents"

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """All validation documents once, in order."""
        assert self.validation is not None
        return validation_batches(self.validation, self.make_sample, batch_size)


def load_corpus(config: RunConfig, student: Side, teachers: Sequence[Side]) -> Corpus:
    """Raises DataError for documents that cannot be read or used."""
    layout = layout_of(config)
    make_sample = build_sample_maker(config, student, teachers)
    if config.routing is not None:
        make_sample = RoutedSampleMaker(make_sample, config.active_names)
    with working("reading data.train"):
        train = load_documents(config.data.train, layout, key="data.train")
    require_answers(train, "data.train")
    require_readable(make_sample, train)
    given = bool(config.data.validation.given)
    with working("reading data.validation"):
        validation = load_documents(config.data.validation, layout, key="data.validation") if given else None
    if validation is not None:
        require_answers(validation, "data.validation")
    return Corpus(train, validation, make_sample)


def require_answers(documents: Dataset, key: str) -> None:
    """Raises DataError for conversations in none of which the assistant says anything; texts pass."""
    if MESSAGES not in documents.column_names:
        return
    roles: set[str] = set()
    for start in range(0, len(documents), ROWS_AT_A_TIME):
        for messages in documents[start : start + ROWS_AT_A_TIME][MESSAGES]:
            roles |= {str(message.get("role")) for message in parsed(messages) or () if isinstance(message, Mapping)}
        if "assistant" in roles:
            return
    raise DataError(
        f"{key}: in none of {len(documents)} conversations the assistant says anything (roles: "
        f"{', '.join(sorted(roles)) or 'none'}), so there is nothing to learn; add its answers, or let the student "
        "answer, with rollout=hf"
    )


def require_readable(make_sample: SampleMaker, documents: Dataset) -> None:
    """Make the first sample. Raises DataError for what would end the run at its first step."""
    try:
        make_sample(read_documents(documents, [0])[0])
    except (AlignmentError, DataError) as error:
        raise DataError(f"data.train: the first document cannot be used: {error}") from error
