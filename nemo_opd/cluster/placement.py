"""Device of each rank of each group, decided before any process starts; and the processes that torchrun has started."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import psutil

from nemo_opd.distributed.layout import Place

Places = tuple[Place, ...]
"""Devices of a group, by rank."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of the student and of every active teacher.

    Ranks are numbered node by node. Where each group has equally many ranks on every node and tp · cp divides them,
    the rows that a rank of the student reads were computed on its own node. Otherwise groups follow one another, and
    rows are sent between nodes.
    """

    student: Places
    teachers: tuple[Places, ...]
    inside: frozenset[int] = frozenset()
    """Indices of teachers that are in the student's processes."""

    def with_inside(self, is_inside: Sequence[bool]) -> Placement:
        """Return the placement with further teachers in the student's processes.

        is_inside: whether each of all teachers is; the others have the places of this placement, in order.
        """
        others = iter(self.teachers)
        teachers = tuple(self.student if inside else next(others) for inside in is_inside)
        return Placement(self.student, teachers, frozenset(i for i, inside in enumerate(is_inside) if inside))

    @classmethod
    def colocated(cls, *, num_nodes: int, ranks_per_node: int, num_teachers: int) -> Placement:
        """Put every group on all devices: rank r of each group is on the same device."""
        every = _places(num_nodes, range(ranks_per_node))
        return cls(every, (every,) * num_teachers)

    @classmethod
    def separate(cls, *, num_nodes: int, student_per_node: int, teachers_per_node: Sequence[int]) -> Placement:
        """Give each group separate devices on every node: first the student's, then each teacher's."""
        groups, first = [], 0
        for count in (student_per_node, *teachers_per_node):
            groups.append(_places(num_nodes, range(first, first + count)))
            first += count
        student, *teachers = groups
        return cls(student, tuple(teachers))

    @classmethod
    def consecutive(cls, sizes: Sequence[int], *, together: Sequence[int], num_nodes: int) -> Placement:
        """Give each group separate devices, node after node; the nodes' numbers of devices differ by at most 1.

        sizes: ranks of the student and of each teacher, at least `num_nodes` in total. together: tp · cp of each group;
        groups with the largest come first, so that these ranks share nodes.
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
        """The places of the student and of every teacher."""
        return (self.student, *self.teachers)

    @property
    def _in_processes(self) -> tuple[Places, ...]:
        """The places of the groups with separate processes."""
        return (self.student, *(places for i, places in enumerate(self.teachers) if i not in self.inside))

    @property
    def devices(self) -> Places:
        """All devices that are used, node by node."""
        return tuple(sorted({place for group in self.groups for place in group}))

    @property
    def num_nodes(self) -> int:
        return 1 + max(place.node for place in self.devices)

    @property
    def devices_per_node(self) -> int:
        """Number of devices on the node that has most."""
        return max(Counter(place.node for place in self.devices).values())

    @property
    def num_processes(self) -> int:
        return sum(map(len, self._in_processes))

    @property
    def groups_per_device(self) -> int:
        """Number of processes on the device that has most."""
        return max(Counter(place for group in self._in_processes for place in group).values())

    def num_threads(self, cores: int) -> int:
        """Return the threads of a process on CPU; those at one place take turns, so that each has what all share."""
        return num_threads(cores, self.devices_per_node)

    @property
    def is_separate(self) -> bool:
        """Whether teachers have their own devices, and so can work while the student does."""
        return len(self._in_processes) > 1 and self.groups_per_device == 1


def _places(num_nodes: int, devices: range) -> Places:
    return tuple(Place(node, device) for node in range(num_nodes) for device in devices)


@dataclass(frozen=True, slots=True)
class Processes:
    """This process alone, or those of torchrun, of which rank 0 drives the run."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @classmethod
    def started(cls) -> Processes:
        """Read torchrun's environment variables."""
        if not _is_torchrun():
            return cls()
        return cls(*(int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")))


def num_threads(cores: int, at_a_time: int) -> int:
    """Return the threads of each of the processes that work at a time: more than cores wait for each other.

    $OMP_NUM_THREADS takes precedence, but under torchrun, which sets it to 1 where nobody else has.
    """
    wanted = "" if _is_torchrun() else os.environ.get("OMP_NUM_THREADS", "")
    return int(wanted) if wanted.isdecimal() and int(wanted) > 0 else max(1, cores // at_a_time)


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_cores() -> int:
    """Return the cores that this process may run on."""
    return len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1
