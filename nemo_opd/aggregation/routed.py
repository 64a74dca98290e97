"""The one teacher that the data name."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_opd.data.documents import Document, Routed
from nemo_opd.data.samples import Sample, SampleMaker
from nemo_opd.errors import DataError


class RoutedSampleMaker:
    """Routed document → Sample with its teacher; what `make` makes, and may cache, does not depend on the teacher."""

    def __init__(self, make: SampleMaker, teachers: Sequence[str]) -> None:
        self._make = make
        self._index = {name: i for i, name in enumerate(teachers)}
        self.identity = f"routed {tuple(teachers)} {make.identity}"

    def __call__(self, document: Document) -> Sample:
        """Raises DataError for a teacher that there is not, and what making the sample raises."""
        assert isinstance(document, Routed)
        if document.teacher not in self._index:
            raise DataError(
                f"a document is routed to {document.teacher!r}, which is no teacher of this run; the teachers are "
                f"{', '.join(self._index)}; correct the rows or the names under teachers"
            )
        return replace(self._make(document.content), route=self._index[document.teacher])
