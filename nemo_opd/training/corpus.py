"""The documents of an off-policy run."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from datasets import Dataset

from nemo_opd.config.run import RunConfig
from nemo_opd.data.documents import MESSAGES, parsed, read_documents
from nemo_opd.data.loader import validation_batches
from nemo_opd.data.samples import SampleMaker
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.progress import working
from nemo_opd.training.inputs import layout_of
from nemo_opd.training.model_info import ModelInfo
from nemo_opd.training.sample_makers import build_sample_maker
from nemo_opd.types import Batch

_ROWS_AT_A_TIME = 256
"""Conversations read at a time to find one with an answer; usually the first has one."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Training and validation documents, and the function that makes samples of them."""

    train: Dataset
    validation: Dataset | None
    make_sample: SampleMaker
    noun: ClassVar[str] = "documents"

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """Yield all validation documents once, in order."""
        assert self.validation is not None
        return validation_batches(self.validation, self.make_sample, batch_size)


def load_corpus(config: RunConfig, student: ModelInfo, teachers: Sequence[ModelInfo]) -> Corpus:
    """Load the documents. Raises DataError for documents that cannot be read or used."""
    layout = layout_of(config)
    make_sample = build_sample_maker(config, student, teachers)
    with working("reading data.train"):
        train = load_documents(config.data.train, layout, key="data.train")
    _require_answers(train, "data.train")
    _require_readable(make_sample, train)
    given = bool(config.data.validation.given)
    with working("reading data.validation"):
        validation = load_documents(config.data.validation, layout, key="data.validation") if given else None
    if validation is not None:
        _require_answers(validation, "data.validation")
    return Corpus(train, validation, make_sample)


def _require_answers(documents: Dataset, key: str) -> None:
    """Raise DataError where no conversation has a message of the assistant; texts pass."""
    if MESSAGES not in documents.column_names:
        return
    roles: set[str] = set()
    for start in range(0, len(documents), _ROWS_AT_A_TIME):
        for messages in documents[start : start + _ROWS_AT_A_TIME][MESSAGES]:
            roles |= {str(message.get("role")) for message in parsed(messages) or () if isinstance(message, Mapping)}
        if "assistant" in roles:
            return
    raise DataError(
        f"{key}: in none of {len(documents)} conversations the assistant says anything (roles: "
        f"{', '.join(sorted(roles)) or 'none'}), so there is nothing to learn; add its answers, or let the student "
        "answer, with rollout=hf"
    )


def _require_readable(make_sample: SampleMaker, documents: Dataset) -> None:
    """Make the first sample, so that the run does not end at its first step. Raises DataError."""
    try:
        make_sample(read_documents(documents, [0])[0])
    except (AlignmentError, DataError) as error:
        raise DataError(f"data.train: the first document cannot be used: {error}") from error
