"""Programs that ask the GPUs themselves, each in a process of its own: `python -m tools.gpu.probe NAME`."""

from __future__ import annotations

import json
import sys
from multiprocessing.connection import Connection

import torch
import torch.multiprocessing as mp

from nemo_opd.handoff.cuda_ipc import CudaIpcReceiver, CudaIpcSender
from nemo_opd.handoff.handle import Handle


def devices() -> dict[str, object]:
    """Return the GPUs, and which of them reach each other's memory."""
    number = torch.cuda.device_count()
    found = [torch.cuda.get_device_properties(i) for i in range(number)]
    peers = [[i != j and torch.cuda.can_device_access_peer(i, j) for j in range(number)] for i in range(number)]
    return {
        "devices": [
            {"name": each.name, "gib": each.total_memory / 2**30, "capability": f"{each.major}.{each.minor}"}
            for each in found
        ],
        "cuda": torch.version.cuda,
        "peers": peers,
    }


def ipc() -> dict[str, object]:
    """Hand numbers over to another process, twice, the second time in a larger buffer, and return what it read."""
    context = mp.get_context("spawn")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read, args=(theirs,))
    reader.start()
    sums = []
    try:
        with CudaIpcSender() as sender:
            for size in (1000, 1_000_000):
                sender.tensor((size,), torch.float32).copy_(torch.arange(size, dtype=torch.float32))
                ours.send(sender.handle())
                sums.append(ours.recv())
            ours.send(None)
            reader.join()
    finally:
        reader.kill()
    wrong = [size for size, found in zip((1000, 1_000_000), sums, strict=True) if found != size - 1]
    if wrong:
        raise RuntimeError(f"of buffers of {wrong} numbers another process read others: {sums}")
    return {"read": sums}


def _read(pipe: Connection) -> None:
    receiver = CudaIpcReceiver()
    try:
        while (handle := pipe.recv()) is not None:
            assert isinstance(handle, Handle)
            pipe.send(float(receiver.tensor(handle).max()))
    finally:
        receiver.close()


if __name__ == "__main__":
    print(json.dumps({"devices": devices, "ipc": ipc}[sys.argv[1]]()))
