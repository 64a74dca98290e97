"""Processes that own a buffer, as a teacher's worker does, or read one, by commands from a pipe."""

from multiprocessing.connection import Connection

import torch

from nemo_opd.handoff.transport import TRANSPORTS


def content(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def run_owner(transport: str, pipe: Connection) -> None:
    """Serve commands: ("export_to", receivers) makes a new sender, ("write", shape, seed) returns a handle."""
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


def run_reader(transport: str, pipe: Connection, number: int) -> None:
    """Return the tensor of each handle that the pipe brings."""
    _, receiver_type = TRANSPORTS[transport]
    with receiver_type(number) as receiver:
        while (command := pipe.recv()) != "stop":
            if command == "close":
                receiver.close()
                pipe.send("closed")
            else:
                pipe.send(receiver.tensor(command).float().cpu().numpy())
