"""A group's worker in one process, and its failure as a value that is sent to the driver."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from nemo_opd.cluster.base import Call, activity
from nemo_opd.errors import OPDError, SenderGoneError, WorkerError
from nemo_opd.workers.memory import Task, needs_memory

CONTINUE = "run.resume=auto continues from the last checkpoint"
_KNOBS = ("lower train.micro_batch_size or train.max_length", "use more ranks")
"""Default advice if memory runs out."""
_PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""Phrases in gloo's errors, plain RuntimeErrors, that indicate a broken connection."""


class Rank:
    """One rank of one group. Its process must have joined the group's world."""

    def __init__(self, worker: type, arguments: Mapping[str, Any]) -> None:
        """Build the worker. Raises the worker's errors, and ClusterError if memory runs out."""
        with needs_memory(Task(activity("start"), _KNOBS)):
            self.worker: Any = worker(**arguments)

    def call(self, method: str, arguments: tuple[Any, ...]) -> Any:
        """Call a method of the worker. Raises the worker's errors, and ClusterError if memory runs out."""
        with needs_memory(Task(activity(method), _KNOBS)):
            return getattr(self.worker, method)(*arguments)

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
