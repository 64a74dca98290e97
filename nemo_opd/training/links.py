"""What teachers on other nodes hand over, brought to the student."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_opd.cluster.base import Group
from nemo_opd.handoff.exchange import ExchangePlanner
from nemo_opd.handoff.link import Rendezvous
from nemo_opd.handoff.window import Window
from nemo_opd.training.plan import Delivery


class Links:
    """Between the student and each teacher of which something crosses nodes; nothing is made or sent for others.

    Both sides are called at once and waited for together, when neither computes: so a rank that dies is named by its
    own side, and no send waits for a receive that is behind it in a queue.
    """

    def __init__(self, student: Group, teachers: Sequence[Group], deliveries: Sequence[Delivery]) -> None:
        """All groups must be ready. Raises WorkerError or ClusterError."""
        self._student, self._teachers = student, teachers
        self._planners = [
            ExchangePlanner(group.size) if delivery.crosses_nodes else None
            for group, delivery in zip(teachers, deliveries, strict=True)
        ]
        if any(self._planners):
            self._join()

    def _join(self) -> None:
        rendezvous = [
            None if planner is None else self._rendezvous(group)
            for planner, group in zip(self._planners, self._teachers, strict=True)
        ]
        calls = [self._student.submit("join_links", [(rendezvous,)] * self._student.size)]
        for group, each in zip(self._teachers, rendezvous, strict=True):
            if each is not None:
                calls.append(group.submit("join_link", [(each,)] * group.size))
        self._student.cluster.gather(calls)

    def _rendezvous(self, teacher: Group) -> Rendezvous:
        return Rendezvous(*teacher.address(), self._student.size, teacher.size, self._student.cluster.timeout_s)

    def bring(self, by_teacher: Sequence[Sequence[Window]], about: str) -> None:
        """What the student needs to read these windows, by teacher and rank of the student; waits for it.

        about: which batch it is, for messages. Raises WorkerError or ClusterError.
        """
        exchanges = [
            None if planner is None else planner.plan(windows)
            for planner, windows in zip(self._planners, by_teacher, strict=True)
        ]
        if all(each is None or each.is_empty for each in exchanges):
            return
        receives = [
            (tuple(() if each is None else each.receives[rank] for each in exchanges),)
            for rank in range(self._student.size)
        ]
        calls = [self._student.submit("receive", receives, about=about)]
        for group, each in zip(self._teachers, exchanges, strict=True):
            if each is not None:
                calls.append(group.submit("send", [(own,) for own in each.sends], about=about))
        self._student.cluster.gather(calls)
