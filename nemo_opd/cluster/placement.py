"""The device of every rank of every group, decided before any process starts; and torchrun's processes."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import psutil

from nemo_opd.distributed.layout import Place

Places = tuple[Place, ...]
"""The device of each rank of a group."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The places of the student and of every active teacher.

    Ranks are numbered node by node. If each group has equally many ranks on every node and tp · cp divides that number,
    a student rank reads only rows computed on its own node. Otherwise groups occupy consecutive devices, and rows are
    sent between nodes.
    """

    student: Places
    teachers: tuple[Places, ...]
    inside: frozenset[int] = frozenset()
    """Indices of teachers that run in the student's processes."""

    def with_inside(self, is_inside: Sequence[bool]) -> Placement:
        """Insert teachers that run in the student's processes.

        is_inside: a flag for every teacher; teachers with False take this placement's teacher places in order.
        """
        separate = iter(self.teachers)
        teachers = tuple(self.student if inside else next(separate) for inside in is_inside)
        return Placement(self.student, teachers, frozenset(i for i, inside in enumerate(is_inside) if inside))

    @classmethod
    def colocated(cls, *, num_nodes: int, ranks_per_node: int, num_teachers: int) -> Placement:
        """Put every group on all devices: ranks r of all groups share a device."""
        places = _places(num_nodes, range(ranks_per_node))
        return cls(places, (places,) * num_teachers)

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
        """Give each group separate devices, node after node; device counts of nodes differ by at most 1.

        sizes: ranks of the student and of each teacher, at least `num_nodes` in total. together: tp · cp of each group;
        groups with larger values come first, so that their ranks share nodes.
        """
        per_node, remainder = divmod(sum(sizes), num_nodes)
        counts = [per_node + (node < remainder) for node in range(num_nodes)]
        devices = iter([Place(node, device) for node, count in enumerate(counts) for device in range(count)])
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
        """All used devices, node by node."""
        return tuple(sorted({place for group in self.groups for place in group}))

    @property
    def num_nodes(self) -> int:
        return 1 + max(place.node for place in self.devices)

    @property
    def devices_per_node(self) -> int:
        """Largest number of devices on one node."""
        return max(Counter(place.node for place in self.devices).values())

    @property
    def num_processes(self) -> int:
        return sum(map(len, self._in_processes))

    @property
    def groups_per_device(self) -> int:
        """Largest number of processes on one device."""
        return max(Counter(place for group in self._in_processes for place in group).values())

    def num_threads(self, cores: int) -> int:
        """Return the threads per process on CPU; processes at one place take turns, so each uses the place's share."""
        return num_threads(cores, self.devices_per_node)

    @property
    def is_separate(self) -> bool:
        """Whether teachers have their own devices, so that they can work at the same time as the student."""
        return len(self._in_processes) > 1 and self.groups_per_device == 1


def _places(num_nodes: int, devices: range) -> Places:
    return tuple(Place(node, device) for node in range(num_nodes) for device in devices)


@dataclass(frozen=True, slots=True)
class Processes:
    """This process only, or its rank among torchrun's processes; rank 0 drives the run."""

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
    """Return the threads per process for `at_a_time` processes that work at once, so that threads do not exceed cores.

    $OMP_NUM_THREADS takes precedence, except under torchrun, which sets it to 1 by default.
    """
    setting = "" if _is_torchrun() else os.environ.get("OMP_NUM_THREADS", "")
    return int(setting) if setting.isdecimal() and int(setting) > 0 else max(1, cores // at_a_time)


def _is_torchrun() -> bool:
    return "TORCHELASTIC_RUN_ID" in os.environ


def num_cores() -> int:
    """Return the cores that this process may run on."""
    return len(psutil.Process().cpu_affinity() or ()) or os.cpu_count() or 1
