"""Sample makers that read each document's teacher from the data."""

from collections.abc import Sequence
from dataclasses import replace

from nemo_opd.data.documents import Document, Routed
from nemo_opd.data.samples import Sample, SampleMaker, WindowMaker

# `RoutedLayout` has rejected data with unknown teachers.


class RoutedSampleMaker:
    """Routed document → Sample with its teacher; samples that `make` caches do not depend on the teacher."""

    def __init__(self, make: SampleMaker, teachers: Sequence[str]) -> None:
        self._make, self._teachers = make, tuple(teachers)
        self.identity = f"routed {self._teachers} {make.identity}"

    def __call__(self, document: Document) -> Sample:
        """Make the sample. Raises whatever `make` raises."""
        assert isinstance(document, Routed)
        return replace(self._make(document.content), route=self._teachers.index(document.teacher))


class RoutedWindowMaker:
    """Routed document → its windows, each with the document's teacher."""

    def __init__(self, make: WindowMaker, teachers: Sequence[str]) -> None:
        self._make, self._teachers = make, tuple(teachers)
        self.identity = f"routed {self._teachers} {make.identity}"

    def __call__(self, document: Document) -> tuple[Sample, ...]:
        """Make the windows. Raises whatever `make` raises."""
        assert isinstance(document, Routed)
        route = self._teachers.index(document.teacher)
        return tuple(replace(sample, route=route) for sample in self._make(document.content))
