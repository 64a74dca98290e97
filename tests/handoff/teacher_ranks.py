"""A teacher's output, the writers of its ranks, and what a student's ranks read of it."""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.base import Receiver
from nemo_opd.handoff.hidden_states import HiddenStatesWriter
from nemo_opd.handoff.logits import LogitsWriter
from nemo_opd.handoff.plan import Readers, Sides
from nemo_opd.handoff.traffic import Payload, planned_readers
from nemo_opd.handoff.window import OutputHandle, Window
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import LogitRows, TensorLogits
from tests.handoff.counting import CountingReceiver, CountingSender

NUM_ROWS, LENGTH, VOCAB, PADDED_VOCAB, HIDDEN = 12, 8, 11, 12, 3
Kind = Literal["hidden_states", "logits"]
LAYOUTS = [
    (Layout(2), Layout(2)),
    (Layout(2), Layout(3)),
    (Layout(3), Layout(2)),
    (Layout(4), Layout(1, 1, 4)),
    (Layout(4), Layout(1, 2, 2)),
    (Layout(1, 1, 4), Layout(2, 1, 2)),
    (Layout(2, 2, 1), Layout(1, 4, 1)),
    (Layout(3), Layout(1, 1, 6)),
]


@dataclass(frozen=True)
class Output:
    """A teacher's whole output, of which its ranks have parts."""

    hidden: Tensor
    head: Head

    @property
    def logits(self) -> Tensor:
        """In plain PyTorch."""
        linear = F.linear(self.hidden, self.head.weight, self.head.bias) * self.head.scale
        assert self.head.soft_cap is not None
        return self.head.soft_cap * torch.tanh(linear / self.head.soft_cap)


def output(seed: int = 0, num_rows: int = NUM_ROWS) -> Output:
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    head = Head(tensor(PADDED_VOCAB, HIDDEN), tensor(PADDED_VOCAB), scale=0.7, soft_cap=4.0)
    return Output(tensor(num_rows, LENGTH, HIDDEN), head)


@dataclass
class Ranks:
    """The writers of a teacher's ranks."""

    kind: Kind
    sides: Sides
    writers: list[HiddenStatesWriter | LogitsWriter]

    @classmethod
    def start(cls, kind: Kind, sides: Sides, *, num_slots: int = 1) -> "Ranks":
        hidden_size = HIDDEN if kind == "hidden_states" else None
        payload = Payload(NUM_ROWS, LENGTH, VOCAB, hidden_size, 8)
        writers: list[HiddenStatesWriter | LogitsWriter] = []
        for rank, readers in enumerate(planned_readers(sides, payload)):
            columns = head_columns(sides.teacher, rank)
            writers.append(cls._writer(kind, columns, readers, num_slots))
        return cls(kind, sides, writers)

    @staticmethod
    def _writer(kind: Kind, columns: range, readers: Readers, num_slots: int) -> HiddenStatesWriter | LogitsWriter:
        more = {"columns": columns, "readers": readers, "num_slots": num_slots}
        if kind == "logits":
            return LogitsWriter(CountingSender, VOCAB, torch.float64, **more)
        return HiddenStatesWriter(CountingSender, VOCAB, HIDDEN, torch.float64, **more)

    def write(self, whole: Output, micro_batch_size: int = 2, slot: int = 0) -> list[OutputHandle]:
        """What each rank has of it, as a forward pass over microbatches gives it."""
        teacher = self.sides.teacher
        own_rows = len(whole.hidden) // teacher.dp
        for rank, writer in enumerate(self.writers):
            d, _, _ = teacher.coordinates(rank)
            writer.begin(own_rows, LENGTH, slot)
            for start in range(0, own_rows, micro_batch_size):
                rows = slice(d * own_rows + start, d * own_rows + min(start + micro_batch_size, own_rows))
                writer.write(start, self._made(whole, rows, head_columns(teacher, rank)))
        return [writer.handle() for writer in self.writers]

    def _made(self, whole: Output, rows: slice, columns: range) -> TensorLogits | HeadLogits:
        cut = slice(columns.start, columns.stop)
        if self.kind == "logits":
            return TensorLogits(whole.logits[rows][..., cut])
        head = whole.head
        return HeadLogits(whole.hidden[rows], Head(head.weight[cut], head.bias[cut], head.scale, head.soft_cap))

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def head_columns(teacher: Layout, rank: int) -> range:
    """The columns of a rank's shard of the padded head, as torch cuts it."""
    chunks = torch.arange(PADDED_VOCAB).chunk(teacher.tp)
    own = chunks[teacher.coordinates(rank)[2]].tolist()
    return range(own[0], own[-1] + 1)


def receivers(stack: ExitStack, number: int) -> list[CountingReceiver]:
    return [stack.enter_context(CountingReceiver(rank)) for rank in range(number)]


def all_of(rows: LogitRows, width: int = VOCAB) -> Tensor:
    batch, positions, _ = rows.shape
    return rows.read(torch.arange(batch * positions), width).view(batch, positions, width)


def read(window: Window, receiver: Receiver, texts: slice = slice(None), width: int = LENGTH) -> Tensor:
    return all_of(window.rows(receiver, texts, width))


def own_rows(sides: Sides, student_rank: int, num_rows: int = NUM_ROWS) -> slice:
    size = num_rows // sides.student.dp
    d, _, _ = sides.student.coordinates(student_rank)
    return slice(d * size, (d + 1) * size)
