"""The interface of a cluster to the driver: groups of ranks and calls to them, with Ray or without."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from nemo_opd.cluster.placement import Places

_ACTIVITIES = {
    "start": "loading its model",
    "load": "reading the checkpoint",
    "forward": "reading a batch",
    "log_probability": "reading a batch after other prompts",
    "bits_per_byte": "reading the validation texts",
    "as_teacher": "working as a teacher with the student's weights",
    "train_step": "training on a batch",
    "evaluate": "validating",
    "generate": "continuing prompts",
    "likelihoods": "reading the questions of a benchmark",
    "save": "writing a checkpoint",
    "export": "writing the trained model",
    "hold_weights": "giving its weights to the rollout server",
    "join_link": "connecting to the student's ranks on other nodes",
    "join_links": "connecting to teachers' ranks on other nodes",
    "send": "sending its output to other nodes",
    "receive": "receiving teachers' output from other nodes",
    "close": "releasing its memory",
}
"""Methods of workers in a user's words."""


def activity(method: str, about: str = "") -> str:
    """Describe a method for a message, such as `training on a batch (step 12)`; about: `step 12`."""
    doing = _ACTIVITIES.get(method, f"in {method!r}")
    return f"{doing} ({about})" if about else doing


@dataclass(frozen=True, slots=True)
class Call:
    """A call on every rank of a group, which may not have returned yet."""

    group: str
    method: str
    about: str
    """Batch or step that it works on, for messages; may be empty."""

    @property
    def doing(self) -> str:
        return activity(self.method, self.about)


class Cluster(ABC):
    """Devices of a placement, and the groups of ranks on them."""

    timeout_s: float

    @abstractmethod
    def group(self, name: str, worker: type, arguments: Mapping[str, Any], places: Places) -> Group:
        """Start building `worker(**arguments)` on every rank, rank r at `places[r]`."""

    @abstractmethod
    def gather(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Wait for calls and return their results, by call and rank. Raises WorkerError and ClusterError."""

    @abstractmethod
    def close(self) -> None:
        """End all processes that the cluster has started, and free its devices."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Group(ABC):
    """The ranks of one model, which the driver calls together."""

    def __init__(self, cluster: Cluster, name: str, places: Places) -> None:
        """places: devices, by rank."""
        self.cluster, self.name, self.places, self.size = cluster, name, places, len(places)

    ready: Call
    """Call that returns when every rank has built its worker."""

    @abstractmethod
    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> Call:
        """Start `method` on every rank, with the rank's own arguments where given.

        about: batch or step that it works on, for messages: "student rank 0 died while training on a batch (<about>)".
        """

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> list[Any]:
        """Call `method` as `submit` does, and return the results by rank. Raises WorkerError and ClusterError."""
        return self.cluster.gather([self.submit(method, arguments, about=about)])[0]

    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Return host and port of the store by which the group's ranks found each other."""

    @abstractmethod
    def close(self) -> None:
        """Have every rank release its resources, and end it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def in_turn(calls: Sequence[tuple[Group, Callable[[], Call]]]) -> list[Call]:
    """Start calls in order, each when those before it on the same devices have returned; return all of them.

    On one device, processes that work at the same time get slices of its time, and each needs its memory. calls: a
    group, and what starts its call. Raises WorkerError and ClusterError.
    """
    begun: list[Call] = []
    under_way: list[tuple[Group, Call]] = []
    for group, start in calls:
        before = [call for other, call in under_way if not set(group.places).isdisjoint(other.places)]
        group.cluster.gather(before)
        begun.append(start())
        under_way = [*((other, call) for other, call in under_way if call not in before), (group, begun[-1])]
    return begun
