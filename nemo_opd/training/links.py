"""Transfer of teachers' output between nodes."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_opd.cluster.base import Group
from nemo_opd.handoff.exchange import ExchangePlanner
from nemo_opd.handoff.link import Rendezvous
from nemo_opd.handoff.window import Window
from nemo_opd.training.delivery import Delivery


class Links:
    """Links between the student and each teacher whose output crosses nodes.

    Sends and receives are submitted and gathered together, while neither group computes: a rank that dies is reported
    by its own group, and no send waits for a receive that is later in a queue.
    """

    def __init__(self, student: Group, teachers: Sequence[Group], deliveries: Sequence[Delivery]) -> None:
        """Join the links; all groups must be ready. Raises WorkerError or ClusterError."""
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

    def transfer(self, by_teacher: Sequence[Sequence[Window]], about: str) -> None:
        """Send the student what these windows read from other nodes, by teacher and rank of the student, and wait.

        about: the batch, for messages. Raises WorkerError or ClusterError.
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
