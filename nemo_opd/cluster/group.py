"""Groups of ranks and calls to them, with Ray or without: the driver's interface, and the side of a rank."""

from __future__ import annotations

import traceback
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch.distributed as dist

from nemo_opd.cluster.placement import Places
from nemo_opd.errors import OPDError, SenderGoneError, WorkerError
from nemo_opd.types import Closing
from nemo_opd.workers.out_of_memory import Task, needs_memory

CONTINUE = "run.resume=auto continues from the last checkpoint"
_ACTIVITIES = {
    "start": "loading its model",
    "load": "reading the checkpoint",
    "forward": "reading a batch",
    "log_probability": "reading a batch after other prompts",
    "token_nats": "reading the validation texts",
    "own_teachers.call": "working as a teacher with the student's weights",
    "train_step": "training on a batch",
    "evaluate": "validating",
    "generate": "continuing prompts",
    "continue_greedily": "continuing texts",
    "likelihoods": "reading the questions of a benchmark",
    "save": "writing a checkpoint",
    "export": "writing the trained model",
    "hold_weights": "giving its weights to the rollout server",
    "join_link": "connecting to the student's ranks on other nodes",
    "links.join": "connecting to teachers' ranks on other nodes",
    "send": "sending its output to other nodes",
    "receive": "receiving teachers' output from other nodes",
    "close": "releasing its memory",
}
"""Descriptions of worker methods, for messages to users."""
_KNOBS = ("lower train.micro_batch_size or train.max_length", "use more ranks")
"""Default advice if memory runs out."""
_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""Phrases in gloo's errors, plain RuntimeErrors, that indicate a broken connection."""


class Cluster(Closing):
    """The devices of a placement, and the groups of ranks on them."""

    timeout_s: float

    @abstractmethod
    def group(self, name: str, worker: type, arguments: Mapping[str, Any], places: Places) -> Group:
        """Start building `worker(**arguments)` on every rank, rank r at `places[r]`."""

    @abstractmethod
    def gather(self, calls: Sequence[Call]) -> list[list[Any]]:
        """Wait for calls; return each call's results, one per rank. Raises WorkerError and ClusterError."""

    @abstractmethod
    def close(self) -> None:
        """End all processes that the cluster has started, and free its devices."""


class Group(Closing):
    """The ranks of one model, which the driver calls together."""

    def __init__(self, cluster: Cluster, name: str, places: Places) -> None:
        """Store the group's properties. places: the device of each rank."""
        self.cluster, self.name, self.places, self.size = cluster, name, places, len(places)

    ready: Call
    """The call that returns when every rank has built its worker."""

    @abstractmethod
    def submit(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> Call:
        """Start `method` on every rank.

        arguments: positional arguments for each rank. about: the batch or step, for messages such as "student rank 0
        died while training on a batch (<about>)".
        """

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]] | None = None, *, about: str = "") -> list[Any]:
        """Call `method` as `submit` does, and return each rank's result. Raises WorkerError and ClusterError."""
        return self.cluster.gather([self.submit(method, arguments, about=about)])[0]

    @abstractmethod
    def address(self) -> tuple[str, int]:
        """Return host and port of the store where the group's ranks meet."""

    @abstractmethod
    def close(self) -> None:
        """Release the resources of every rank, and end the ranks."""


@dataclass(frozen=True, slots=True)
class Call:
    """A call on every rank of a group, which may not have returned yet."""

    group: str
    method: str
    about: str
    """The batch or step, for messages; may be empty."""

    @property
    def doing(self) -> str:
        return activity(self.method, self.about)


def activity(method: str, about: str = "") -> str:
    """Describe a method for a message: `training on a batch (step 12)` if `about` is `step 12`."""
    doing = _ACTIVITIES.get(method, f"in {method!r}")
    return f"{doing} ({about})" if about else doing


def submit_sequentially(calls: Sequence[tuple[Group, Callable[[], Call]]]) -> list[Call]:
    """Start calls in order, each after earlier calls on the same devices have returned; return all calls.

    Processes that work on one device at the same time would share its time, and all need memory at once. calls: pairs
    of a group and the function that starts its call. Raises WorkerError and ClusterError.
    """
    started: list[Call] = []
    pending: list[tuple[Group, Call]] = []
    for group, start in calls:
        blocking = [call for busy, call in pending if not set(group.places).isdisjoint(busy.places)]
        group.cluster.gather(blocking)
        started.append(start())
        pending = [*((busy, call) for busy, call in pending if call not in blocking), (group, started[-1])]
    return started


class Rank:
    """One rank of one group. Its process must have joined the group's world."""

    def __init__(self, worker: type, arguments: Mapping[str, Any]) -> None:
        """Build the worker. Raises the worker's errors, and ClusterError if memory runs out."""
        with needs_memory(Task(activity("start"), _KNOBS)):
            self.worker: Any = worker(**arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the worker, or of an attribute of it, such as `links.join`.

        Raises the worker's errors, and ClusterError if memory runs out.
        """
        with needs_memory(Task(activity(method), _KNOBS)):
            return attrgetter(method)(self.worker)(*arguments)

    def close(self) -> None:
        self.worker.close()


@dataclass(frozen=True, slots=True)
class Failure:
    """A worker's exception as a value, which the driver can raise while other ranks still wait for this one."""

    error: str
    traceback: str
    """Empty for an OPDError, whose message suffices."""
    is_from_peer: bool = False
    """Whether a collective or handoff broke, most likely because another rank died or failed."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """Describe the exception that is being handled."""
        message = f"{type(error).__name__}: {error}"
        if isinstance(error, OPDError):
            return cls(message, "", isinstance(error, SenderGoneError))
        is_from_peer = isinstance(error, dist.DistError) or (
            isinstance(error, RuntimeError) and any(sign in str(error) for sign in _PEER)
        )
        return cls(message, traceback.format_exc(), is_from_peer)

    def as_error(self, call: Call, rank: int) -> WorkerError:
        """Return the error that the driver raises for this rank; a PeerError if another rank is the likely cause."""
        kind = PeerError if self.is_from_peer else WorkerError
        return kind(call.group, rank, f"{self.error} (while {call.doing})", self.traceback)


class PeerError(WorkerError):
    """Error of a rank that another rank's failure probably caused."""
