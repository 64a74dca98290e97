"""A test, in separate processes, whether processes of this machine can read each other's buffers.

`python -m nemo_opd.handoff.obstacle TRANSPORT PAIRS` hands numbers over as a run does. PAIRS: JSON, pairs of the
indices of the device that writes and of the one that reads.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection

import torch

from nemo_opd.commands import run
from nemo_opd.errors import HandoffError
from nemo_opd.handoff.transport import TRANSPORTS

_Pairs = Sequence[tuple[int, int]]
_LIMIT_S = 120.0
"""Limit of a try. PyTorch and CUDA start in seconds, on a slow file system in a minute."""
_SIZES = (1_000, 1_000_000)
"""Numbers that are handed over; the second time they need another buffer."""


def obstacle(transport: str, pairs: _Pairs, limit_s: float = _LIMIT_S) -> str | None:
    """Return why a buffer on the first device of a pair cannot be read from the second, or None where all can.

    Tries one pair of the same device and one of two, and asks about the peer access of all. Returns after `limit_s` at
    the latest, and leaves no process behind.
    """
    chosen = [*[pair for pair in pairs if pair[0] == pair[1]][:1], *[pair for pair in pairs if pair[0] != pair[1]]]
    return complaint([sys.executable, "-m", __name__, transport, json.dumps(chosen)], limit_s)


def complaint(command: Sequence[str], limit_s: float) -> str | None:
    """Run a command; return the last line that it printed, or that it did not end; None where it succeeds."""
    status, output = run(command, limit_s, paths=sys.path)
    if status is None:
        return f"no answer in {limit_s:g} s"
    if status == 0:
        return None
    lines = output.strip().splitlines()
    return lines[-1].strip() if lines else f"exit status {status}"


def hand_over(transport: str, pairs: _Pairs) -> None:
    """Hand numbers over to a process for the first of each kind of pair. Raises what a run would raise."""
    context = multiprocessing.get_context("fork")  # before CUDA is initialised, which would not survive it
    kinds = {writes == reads: (writes, reads) for writes, reads in reversed(pairs)}.values()
    tries = []
    for writes, reads in kinds:
        ours, theirs = context.Pipe()
        context.Process(target=_read, args=(transport, reads, theirs), daemon=True).start()
        theirs.close()
        tries.append((writes, ours))
    _require_peers([pair for pair in pairs if pair[0] != pair[1]] if transport == "cuda_ipc" else [])
    for writes, pipe in tries:
        _write(transport, writes, pipe)


def _require_peers(pairs: _Pairs) -> None:
    for writes, reads in pairs:
        if not torch.cuda.can_device_access_peer(reads, writes):
            raise HandoffError(f"GPU {reads} has no peer access to GPU {writes}")


def _write(transport: str, device: int, pipe: Connection) -> None:
    _use(transport, device)
    sender_type, _ = TRANSPORTS[transport]
    with sender_type() as sender:
        for size in _SIZES:
            sender.tensor((size,), torch.float64).copy_(torch.arange(size))
            pipe.send(sender.handle())
            try:
                answer = pipe.recv()
            except EOFError:
                raise HandoffError("the process that reads has died") from None
            if answer != size * (size - 1) / 2:
                raise HandoffError(answer if isinstance(answer, str) else "other numbers were read than written")
        pipe.send(None)
        pipe.recv()


def _read(transport: str, device: int, pipe: Connection) -> None:
    """Answer each handle with the sum of what it leads to, or with what went wrong."""
    try:
        _use(transport, device)
        _, receiver_type = TRANSPORTS[transport]
        with receiver_type() as receiver:
            while (handle := pipe.recv()) is not None:
                pipe.send(float(receiver.near(receiver.tensor(handle)).sum()))
        pipe.send("closed")
    except Exception as error:
        pipe.send(_line(error))


def _use(transport: str, device: int) -> None:
    if transport != "shared_memory":
        torch.cuda.set_device(device)


def _line(error: Exception) -> str:
    """Return an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    try:
        hand_over(sys.argv[1], json.loads(sys.argv[2]))
    except Exception as error:
        sys.exit(_line(error))
