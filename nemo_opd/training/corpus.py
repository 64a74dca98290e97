"""The texts of an off-policy run, as student and teachers see them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from datasets import Dataset

from nemo_opd.aggregation.routed import RoutedSampleMaker
from nemo_opd.config.run import RunConfig
from nemo_opd.data import layout as columns
from nemo_opd.data.documents import read_documents
from nemo_opd.data.loader import validation_batches
from nemo_opd.data.samples import SampleMaker
from nemo_opd.data.sources import load_documents
from nemo_opd.errors import AlignmentError, DataError
from nemo_opd.training.sides import Side, build_sample_maker
from nemo_opd.types import Batch


@dataclass(frozen=True, slots=True)
class Corpus:
    train: Dataset
    validation: Dataset | None
    make_sample: SampleMaker

    def validation_batches(self, batch_size: int) -> Iterator[Batch]:
        """All validation documents once, in order."""
        assert self.validation is not None
        return validation_batches(self.validation, self.make_sample, batch_size)


def load_corpus(config: RunConfig, student: Side, teachers: Sequence[Side]) -> Corpus:
    """Raises DataError for documents that cannot be read or used."""
    layout: columns.Layout = columns.layout_of(config.data)
    make_sample = build_sample_maker(config, student, teachers)
    if config.routing is not None:
        layout = columns.RoutedLayout(layout, config.routing.key, config.active_names)
        make_sample = RoutedSampleMaker(make_sample, config.active_names)
    train = load_documents(config.data.train, layout, key="data.train")
    require_readable(make_sample, train)
    given = bool(config.data.validation.given)
    validation = load_documents(config.data.validation, layout, key="data.validation") if given else None
    return Corpus(train, validation, make_sample)


def require_readable(make_sample: SampleMaker, documents: Dataset) -> None:
    """Make the first sample. Raises DataError for what would end the run at its first step."""
    try:
        make_sample(read_documents(documents, [0])[0])
    except (AlignmentError, DataError) as error:
        raise DataError(f"data.train: the first document cannot be used: {error}") from error
