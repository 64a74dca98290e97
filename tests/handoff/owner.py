"""Processes that own a buffer, as a teacher's worker does, or read one; they are told what to do through a pipe."""

from multiprocessing.connection import Connection

import torch

from nemo_opd.handoff.transport import TRANSPORTS


def content(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def own(transport: str, pipe: Connection) -> None:
    """("export_to", receivers) starts anew, ("write", shape, seed) gives a handle."""
    sender_type, _ = TRANSPORTS[transport]
    sender = sender_type()
    while (command := pipe.recv()) != "stop":
        match command:
            case "close":
                sender.close()
                pipe.send("closed")
            case "memory":
                torch.cuda.ipc_collect()
                pipe.send(torch.cuda.memory_allocated())
            case "export_to", receivers:
                sender.close()
                sender = sender_type(receivers)
                pipe.send("made")
            case "write", shape, seed:
                sender.tensor(shape, torch.bfloat16).copy_(content(shape, seed))
                pipe.send(sender.handle())
    sender.close()


def read(transport: str, pipe: Connection, number: int) -> None:
    """A handle gives what it leads to."""
    _, receiver_type = TRANSPORTS[transport]
    with receiver_type(number) as receiver:
        while (command := pipe.recv()) != "stop":
            if command == "close":
                receiver.close()
                pipe.send("closed")
            else:
                pipe.send(receiver.tensor(command).float().cpu().numpy())
