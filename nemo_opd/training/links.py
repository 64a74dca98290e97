"""What teachers on other nodes hand over, brought to the student."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_opd.cluster.base import Group
from nemo_opd.handoff.link import Meeting
from nemo_opd.handoff.post import Post
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
        self._posts = [
            Post(group.size) if delivery.crosses_nodes else None
            for group, delivery in zip(teachers, deliveries, strict=True)
        ]
        if any(self._posts):
            self._join()

    def _join(self) -> None:
        meetings = [
            None if post is None else self._meeting(group)
            for post, group in zip(self._posts, self._teachers, strict=True)
        ]
        calls = [self._student.submit("join_links", [(meetings,)] * self._student.size)]
        for group, meeting in zip(self._teachers, meetings, strict=True):
            if meeting is not None:
                calls.append(group.submit("join_link", [(meeting,)] * group.size))
        self._student.cluster.gather(calls)

    def _meeting(self, teacher: Group) -> Meeting:
        return Meeting(*teacher.address(), self._student.size, teacher.size, self._student.cluster.timeout_s)

    def bring(self, by_teacher: Sequence[Sequence[Window]], about: str) -> None:
        """What the student needs to read these windows, by teacher and rank of the student; waits for it.

        about: which batch it is, for messages. Raises WorkerError or ClusterError.
        """
        rounds = [
            None if post is None else post.round(windows) for post, windows in zip(self._posts, by_teacher, strict=True)
        ]
        if all(each is None or each.is_empty for each in rounds):
            return
        arrivals = [
            (tuple(() if each is None else each.arrivals[rank] for each in rounds),)
            for rank in range(self._student.size)
        ]
        calls = [self._student.submit("receive", arrivals, about=about)]
        for group, each in zip(self._teachers, rounds, strict=True):
            if each is not None:
                calls.append(group.submit("send", [(own,) for own in each.sendings], about=about))
        self._student.cluster.gather(calls)
