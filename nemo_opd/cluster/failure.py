"""What went wrong in a worker, as a value that travels to the driver."""

from __future__ import annotations

import traceback
from dataclasses import dataclass

import torch.distributed as dist

from nemo_opd.cluster.base import Call
from nemo_opd.errors import OPDError, WorkerError

CONTINUE = "run.resume=auto continues from the last checkpoint"
PEER = ("gloo/transport", "Connection closed by peer", "Connection reset by peer")
"""In a collective's error on CPU, which is a plain RuntimeError."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception as a value: raised in the driver, with the rank, while other ranks still wait for this one."""

    error: str
    traceback: str
    """Empty for an error of our own, which says all that there is to know."""
    is_of_a_peer: bool = False
    """A collective that broke: the cause is most likely another rank, which has died or failed."""

    @classmethod
    def of(cls, error: Exception) -> Failure:
        """To be called where the exception is handled."""
        told = "" if isinstance(error, OPDError) else traceback.format_exc()
        return cls(f"{type(error).__name__}: {error}", told, is_of_a_peer(error))

    def as_error(self, call: Call, rank: int) -> WorkerError:
        """Return the error that the driver raises for this rank; a PeerError if another rank is the likely cause."""
        kind = PeerError if self.is_of_a_peer else WorkerError
        return kind(call.group, rank, f"{self.error} (while {call.doing})", self.traceback)


class PeerError(WorkerError):
    """A rank that failed because another one did."""


def is_of_a_peer(error: Exception) -> bool:
    """Our own errors say what they are about."""
    if isinstance(error, OPDError):
        return False
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in PEER)
