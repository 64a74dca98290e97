"""A teacher with the student's weights, which the driver calls as any other."""

from collections.abc import Sequence
from typing import Any

from nemo_opd.cluster.base import Call, Group


class OwnTeacher(Group):
    """A group whose workers are in those of the student's, which end them."""

    def __init__(self, student: Group, teacher: int, name: str) -> None:
        """teacher: its index among the active ones. name: the teacher's, for messages."""
        super().__init__(student.cluster, f"teacher {name}", student.places)
        self._student, self._teacher, self.ready = student, teacher, student.ready

    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> Call:
        per_rank = [()] * self.size if arguments is None else arguments
        inner = [(self._teacher, method, own) for own in per_rank]
        return self._student.submit("as_teacher", inner, about=about)

    def address(self) -> tuple[str, int]:
        return self._student.address()

    def close(self) -> None:
        """Do nothing: the student's workers release what is the teacher's."""
