"""Transfer of teacher output between nodes."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_opd.cluster.base import Group
from nemo_opd.handoff.exchange import ExchangePlanner
from nemo_opd.handoff.link import Rendezvous
from nemo_opd.handoff.window import Window
from nemo_opd.training.delivery import Delivery


class Links:
    """Links between the student and each teacher whose output crosses nodes.

    Sends and receives are submitted and gathered together while neither group computes. So a dead rank is reported by
    its own group, and no send waits for a receive further back in a queue.
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
        for group, meeting in zip(self._teachers, rendezvous, strict=True):
            if meeting is not None:
                calls.append(group.submit("join_link", [(meeting,)] * group.size))
        self._student.cluster.gather(calls)

    def _rendezvous(self, teacher: Group) -> Rendezvous:
        return Rendezvous(*teacher.address(), self._student.size, teacher.size, self._student.cluster.timeout_s)

    def transfer(self, by_teacher: Sequence[Sequence[Window]], about: str) -> None:
        """Send the student the rows that these windows read from other nodes, and wait.

        by_teacher: windows of each teacher, one per student rank. about: the batch, for messages. Raises WorkerError or
        ClusterError.
        """
        exchanges = [
            None if planner is None else planner.plan(windows)
            for planner, windows in zip(self._planners, by_teacher, strict=True)
        ]
        if all(exchange is None or exchange.is_empty for exchange in exchanges):
            return
        receives = [
            (tuple(() if exchange is None else exchange.receives[rank] for exchange in exchanges),)
            for rank in range(self._student.size)
        ]
        calls = [self._student.submit("receive", receives, about=about)]
        for group, exchange in zip(self._teachers, exchanges, strict=True):
            if exchange is not None:
                calls.append(group.submit("send", [(messages,) for messages in exchange.sends], about=about))
        self._student.cluster.gather(calls)
