"""Failures of workers: whether another rank has caused them."""

import pytest
import torch.distributed as dist

from nemo_opd.cluster.group import Failure
from nemo_opd.errors import HandoffError, SenderGoneError


def caught(error: Exception) -> Failure:
    try:
        raise error
    except Exception as raised:
        return Failure.of(raised)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[../third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1"),
        dist.DistBackendError("NCCL communicator was aborted"),
        dist.DistStoreError("wait timeout after 1000ms"),
        SenderGoneError("its process 7 has released it or died"),
    ],
)
def test_a_broken_collective_or_handoff_is_from_a_peer(error: Exception) -> None:
    assert caught(error).is_from_peer


@pytest.mark.parametrize("error", [KeyError("no such thing"), RuntimeError("shapes"), HandoffError("reset by peer")])
def test_other_errors_are_a_ranks_own(error: Exception) -> None:
    failure = caught(error)

    assert not failure.is_from_peer
    assert failure.error == f"{type(error).__name__}: {error}"
    assert ("in caught" in failure.traceback) is not isinstance(error, HandoffError), "an error of our own is one line"
