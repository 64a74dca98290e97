"""Teacher with the student's weights, called like any other teacher."""

from collections.abc import Sequence
from typing import Any

from nemo_opd.cluster.base import Call, Group


class OwnTeacher(Group):
    """Group whose workers live inside the student's workers, which also end them."""

    def __init__(self, student: Group, teacher: int, name: str) -> None:
        """teacher: index among the active teachers. name: the teacher's name for messages."""
        super().__init__(student.cluster, f"teacher {name}", student.places)
        self._student, self._teacher, self.ready = student, teacher, student.ready

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> Call:
        by_rank = [()] * self.size if arguments is None else arguments
        forwarded = [(self._teacher, method, rank_arguments) for rank_arguments in by_rank]
        return self._student.submit("as_teacher", forwarded, about=about)

    def address(self) -> tuple[str, int]:
        return self._student.address()

    def close(self) -> None:
        """Do nothing: the student's workers release the teacher."""
