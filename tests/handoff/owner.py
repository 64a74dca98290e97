"""A process that owns a buffer, as a teacher's worker does; it is told what to do through a pipe."""

from multiprocessing.connection import Connection

import torch

from nemo_opd.handoff.transport import TRANSPORTS


def content(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


def own(transport: str, pipe: Connection) -> None:
    sender_type, _ = TRANSPORTS[transport]
    with sender_type() as sender:
        while (command := pipe.recv()) != "stop":
            if command == "close":
                sender.close()
                pipe.send("closed")
                continue
            shape, seed = command
            sender.tensor(shape, torch.bfloat16).copy_(content(shape, seed))
            pipe.send(sender.handle())
