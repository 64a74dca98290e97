"""What the driver needs of a cluster, whoever starts its processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from nemo_opd.cluster.activity import activity
from nemo_opd.cluster.placement import Places


@dataclass(frozen=True, slots=True)
class Call:
    """A call on every rank of a group, which may still be under way."""

    group: str
    method: str
    about: str
    """Which batch or step it works on, for messages; may be empty."""

    @property
    def doing(self) -> str:
        return activity(self.method, self.about)


class Cluster(ABC):
    """The devices of a placement, and the groups that work on them."""

    timeout_s: float

    @abstractmethod
    def group(self, name: str, worker: type, arguments: Mapping[str, Any], places: Places) -> Group:
        """Build `worker(**arguments)` on every rank, rank r at `places[r]`; returns at once where it can."""

    @abstractmethod
    def gather(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Wait for calls and return their results, by call and rank. Raises WorkerError and ClusterError."""

    @abstractmethod
    def close(self) -> None:
        """End all processes that it has started, and free its devices."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Group(ABC):
    """The ranks of one model as a unit that the driver calls."""

    def __init__(self, cluster: Cluster, name: str, size: int) -> None:
        self.cluster, self.name, self.size = cluster, name, size

    ready: Call
    """Returns once every rank has built its worker."""

    @abstractmethod
    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> Call:
        """Call `method` on every rank, with its own arguments where given; returns at once where it can.

        about: which batch or step it works on, for messages: "student rank 0 died while training on a batch (<about>)".
        """

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> list[Any]:
        """`submit` and wait: the results by rank. Raises WorkerError and ClusterError."""
        return self.cluster.gather([self.submit(method, arguments, about=about)])[0]

    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Return host and port of the store by which the group's ranks found each other."""

    @abstractmethod
    def close(self) -> None:
        """Have every rank release what it holds, and end it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
