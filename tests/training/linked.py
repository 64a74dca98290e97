"""A student and a teacher worker that only hand over rows, for tests of the links between nodes."""

import torch
import torch.distributed as dist

from nemo_opd.handoff.buffer import Handle, Message
from nemo_opd.handoff.link import Link, Rendezvous, StudentLinks
from nemo_opd.handoff.outputs import HiddenStatesHandle, HiddenStatesWindow, HiddenStatesWriter
from nemo_opd.handoff.shared_memory import SharedMemoryReceiver, SharedMemorySender
from nemo_opd.handoff.slices import Readers
from nemo_opd.logits.head import Head, HeadLogits
from tests.packings import packing_of
from tests.training.faulty_rank import die

LENGTHS, WIDTH, VOCAB = (3, 2), 5, 7


def hidden(batch: int) -> torch.Tensor:
    return torch.randn(sum(LENGTHS), WIDTH, generator=torch.Generator().manual_seed(batch))


class Teaching:
    def __init__(self) -> None:
        readers = Readers((), (), sends_head=True)
        self.writer = HiddenStatesWriter(
            SharedMemorySender, VOCAB, WIDTH, torch.float32, columns=range(VOCAB), readers=readers
        )

    def forward(self, batch: int, dies: bool) -> HiddenStatesHandle:
        self.dies = dies
        self.writer.begin(sum(LENGTHS))
        self.writer.write(0, HeadLogits(hidden(batch).unsqueeze(0), Head(torch.ones(VOCAB, WIDTH))))
        return self.writer.handle()

    def join_link(self, rendezvous: Rendezvous) -> None:
        self.link = Link(rendezvous, "cpu", teacher=dist.get_rank())

    def send(self, messages: list[Message]) -> None:
        if self.dies:
            die()
        buffers = {sender.identity: sender.last for sender in self.writer.senders if sender.allocation}
        self.link.send([(message.payload(buffers[message.sender]), message.student_rank) for message in messages])

    def close(self) -> None:
        self.writer.close()


class Learning:
    def __init__(self) -> None:
        self.receiver = SharedMemoryReceiver(dist.get_rank())
        self.links = StudentLinks(self.receiver, "cpu")

    def receive(self, by_teacher: list[list[Handle]]) -> None:
        self.links.receive(by_teacher)

    def read(self, window: HiddenStatesWindow) -> torch.Tensor:
        rows = window.rows(self.receiver, slice(None), max(LENGTHS))
        return rows.read(packing_of(*LENGTHS).tokens, VOCAB)

    def close(self) -> None:
        self.receiver.close()
