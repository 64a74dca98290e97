"""The transports, keyed by name, the choice of one, and its trial, which runs as a program of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection

import torch

from nemo_opd.config.cluster import HandoffBase
from nemo_opd.errors import ConfigError, HandoffError
from nemo_opd.handoff.buffer import Receiver, Sender
from nemo_opd.handoff.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_opd.handoff.shared_memory import (
    PinnedMemoryReceiver,
    PinnedMemorySender,
    SharedMemoryReceiver,
    SharedMemorySender,
)

TRANSPORTS: dict[str, tuple[type[Sender], type[Receiver]]] = {
    "cuda_ipc": (CudaIpcSender, CudaIpcReceiver),
    "pinned_memory": (PinnedMemorySender, PinnedMemoryReceiver),
    "shared_memory": (SharedMemorySender, SharedMemoryReceiver),
}
"""Sender and receiver types; on GPUs `handoff.transport=shared_memory` means `pinned_memory`."""
_Pairs = Sequence[tuple[int, int]]
_LIMIT_S = 120.0
"""Time limit of a trial. PyTorch and CUDA start in seconds, on a slow file system in a minute."""
_CLOSED_S = 5.0
"""Wait for the end of a killed trial's output."""
_SIZES = (1_000, 1_000_000)
"""Sizes of the tensors that are handed over; the second needs a larger buffer."""


def choose_transport(handoff: HandoffBase, device: str, obstacle: Callable[[], str | None]) -> tuple[str, list[str]]:
    """Return the transport's name, and a warning if `auto` cannot use the transport that it prefers.

    obstacle: tries CUDA IPC and returns why it cannot be used, or None; called only if the answer matters. Raises
    ConfigError if the configured transport cannot be used.
    """
    if device == "cpu":
        if handoff.transport == "cuda_ipc":
            raise ConfigError(
                "handoff.transport=cuda_ipc: the run is on cpu, where only shared_memory works; write "
                "handoff.transport=auto or shared_memory"
            )
        return "shared_memory", []
    if handoff.transport == "shared_memory":
        return "pinned_memory", []
    reason = obstacle()
    if reason is None:
        return "cuda_ipc", []
    if handoff.transport == "cuda_ipc":
        raise ConfigError(
            "handoff.transport=cuda_ipc: processes on this machine cannot read each other's GPU memory "
            f"({reason}); write handoff.transport=auto or shared_memory, which goes through main memory, or let the "
            "processes share PID and IPC namespaces (in Docker --pid=host --ipc=host)"
        )
    return "pinned_memory", [
        "handoff.transport=auto: teachers' output goes through pinned main memory, because processes on this machine "
        f"cannot read each other's GPU memory ({reason}); write handoff.transport=shared_memory to skip this check"
    ]


def probe_transport(transport: str, pairs: _Pairs, limit_s: float = _LIMIT_S) -> str | None:
    """Return why a buffer on the first device of a pair cannot be read from the second, or None if all can.

    Tries one pair with the same device and one with different devices, and checks peer access for all pairs. Returns
    after `limit_s` at the latest, and leaves no process behind.
    """
    tried = [*[pair for pair in pairs if pair[0] == pair[1]][:1], *[pair for pair in pairs if pair[0] != pair[1]]]
    return complaint([sys.executable, "-m", __name__, transport, json.dumps(tried)], limit_s)


def complaint(command: Sequence[str], limit_s: float) -> str | None:
    """Run a command; return None if it succeeds, else its last line of output, or that it did not end in time.

    It runs in a separate session, whose processes are killed when it ends. Raises OSError if it does not exist.
    """
    process = subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in a driver, or left the session
            process.communicate(timeout=_CLOSED_S)
        return f"no answer in {limit_s:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    lines = output.strip().splitlines() or [f"exit status {process.returncode}"]
    return lines[-1].strip() if process.returncode else None


def hand_over(transport: str, pairs: _Pairs) -> None:
    """Hand numbers over for the first same-device and the first two-device pair. Raises the errors of a run."""
    context = multiprocessing.get_context("fork")  # before CUDA is initialised, which does not survive a fork
    kinds = {writes == reads: (writes, reads) for writes, reads in reversed(pairs)}.values()
    writers = []
    for writes, reads in kinds:
        ours, theirs = context.Pipe()
        context.Process(target=_read, args=(transport, reads, theirs), daemon=True).start()
        theirs.close()
        writers.append((writes, ours))
    for writes, reads in pairs if transport == "cuda_ipc" else ():
        if writes != reads and not torch.cuda.can_device_access_peer(reads, writes):
            raise HandoffError(f"GPU {reads} has no peer access to GPU {writes}")
    for writes, pipe in writers:
        _write(transport, writes, pipe)


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
                raise HandoffError("the reading process died") from None
            if answer != size * (size - 1) / 2:
                raise HandoffError(answer if isinstance(answer, str) else "the reader did not get the written numbers")
        pipe.send(None)
        pipe.recv()


def _read(transport: str, device: int, pipe: Connection) -> None:
    """Answer each handle with the sum of its tensor, or with the error."""
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
    """Format an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


if __name__ == "__main__":
    try:
        hand_over(sys.argv[1], json.loads(sys.argv[2]))
    except Exception as error:
        sys.exit(_line(error))
