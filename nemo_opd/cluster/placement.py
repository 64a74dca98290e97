"""Which device each rank of each group is on: settled before any process starts, and carried out by a Cluster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import psutil

from nemo_opd.distributed.layout import Place

Places = tuple[Place, ...]
"""Of a group, by rank."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of the student and of every active teacher.

    Ranks go node by node. Where each group has the same number of ranks on every node, its data-parallel parts lie on
    the nodes in one order for all groups: if tp · cp divides a group's ranks on a node, the rows that a rank of the
    student reads were computed on its own node. Else groups lie one after another, and those rows are sent.
    """

    student: Places
    teachers: tuple[Places, ...]

    @classmethod
    def colocated(cls, *, num_nodes: int, ranks_per_node: int, num_teachers: int) -> Placement:
        """All groups on all devices: rank r of each is on the same one."""
        every = places(num_nodes, range(ranks_per_node))
        return cls(every, (every,) * num_teachers)

    @classmethod
    def separate(cls, *, num_nodes: int, student_per_node: int, teachers_per_node: Sequence[int]) -> Placement:
        """No device has two groups. On a node the student's come first, then each teacher's."""
        groups, first = [], 0
        for count in (student_per_node, *teachers_per_node):
            groups.append(places(num_nodes, range(first, first + count)))
            first += count
        student, *teachers = groups
        return cls(student, tuple(teachers))

    @classmethod
    def consecutive(cls, sizes: Sequence[int], *, together: Sequence[int], num_nodes: int) -> Placement:
        """No device has two groups, which fill the nodes in turn; nodes differ by a device at most.

        sizes: ranks of the student and of each teacher, no fewer in all than nodes. together: how many consecutive ones
        of each belong together; groups with most of these come first, so that those fill whole nodes.
        """
        each, more = divmod(sum(sizes), num_nodes)
        devices = iter([Place(node, device) for node in range(num_nodes) for device in range(each + (node < more))])
        groups: dict[int, Places] = {}
        for group in sorted(range(len(sizes)), key=lambda group: -together[group]):
            groups[group] = tuple(islice(devices, sizes[group]))
        student, *teachers = (groups[group] for group in range(len(sizes)))
        return cls(student, tuple(teachers))

    @property
    def groups(self) -> tuple[Places, ...]:
        return (self.student, *self.teachers)

    @property
    def devices(self) -> Places:
        """All that are used, node by node."""
        return tuple(sorted({place for group in self.groups for place in group}))

    @property
    def num_nodes(self) -> int:
        return 1 + max(place.node for place in self.devices)

    @property
    def devices_per_node(self) -> int:
        """Of the node that has most."""
        return max(Counter(place.node for place in self.devices).values())

    @property
    def num_processes(self) -> int:
        return sum(map(len, self.groups))

    @property
    def groups_per_device(self) -> int:
        """Processes on the device that has most of them."""
        return max(Counter(place for group in self.groups for place in group).values())

    @property
    def is_separate(self) -> bool:
        """Whether teachers have devices of their own, and so can work while the student does."""
        return bool(self.teachers) and self.groups_per_device == 1


def places(num_nodes: int, devices: range) -> Places:
    return tuple(Place(node, device) for node in range(num_nodes) for device in devices)


def num_cores() -> int:
    """Return the cores that this process may run on."""
    return len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1
