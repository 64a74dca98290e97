"""The one teacher that the data name."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_opd.data.documents import Document, Routed
from nemo_opd.data.samples import Sample, SampleMaker, WindowMaker
from nemo_opd.errors import DataError


class _Routes:
    """Teachers by name, for the documents that name one."""

    def __init__(self, teachers: Sequence[str]) -> None:
        self._index = {name: i for i, name in enumerate(teachers)}

    @property
    def identity(self) -> str:
        return f"routed {tuple(self._index)}"

    def read(self, document: Document) -> tuple[Document, int]:
        """Return the document and the index of its teacher. Raises DataError for an unknown teacher."""
        assert isinstance(document, Routed)
        if document.teacher not in self._index:
            raise DataError(
                f"a document is routed to {document.teacher!r}, which is no teacher of this run; the teachers are "
                f"{', '.join(self._index)}; correct the rows or the names under teachers"
            )
        return document.content, self._index[document.teacher]


class RoutedSampleMaker:
    """Routed document → Sample with its teacher; what `make` makes, and may cache, does not depend on the teacher."""

    def __init__(self, make: SampleMaker, teachers: Sequence[str]) -> None:
        self._make, self._routes = make, _Routes(teachers)
        self.identity = f"{self._routes.identity} {make.identity}"

    def __call__(self, document: Document) -> Sample:
        """Make the sample. Raises DataError for an unknown teacher, and what making the sample raises."""
        content, route = self._routes.read(document)
        return replace(self._make(content), route=route)


class RoutedWindowMaker:
    """Routed document → its windows, each with its teacher."""

    def __init__(self, make: WindowMaker, teachers: Sequence[str]) -> None:
        self._make, self._routes = make, _Routes(teachers)
        self.identity = f"{self._routes.identity} {make.identity}"

    def __call__(self, document: Document) -> tuple[Sample, ...]:
        """Make the windows. Raises DataError for an unknown teacher, and what making the windows raises."""
        content, route = self._routes.read(document)
        return tuple(replace(sample, route=route) for sample in self._make(content))
