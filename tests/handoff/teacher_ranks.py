"""A teacher's output, the writers of its ranks, and reads of a student's ranks."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.distributed.layout import Layout
from nemo_opd.handoff.buffer import Receiver
from nemo_opd.handoff.outputs import HiddenStatesWindow, HiddenStatesWriter, LogitsWriter, OutputHandle, Window
from nemo_opd.handoff.slices import LayoutPair, Payload, Readers, planned_readers
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import TensorLogits
from tests.handoff.counting import CountingReceiver, CountingSender
from tests.packings import packing_of

LENGTHS = (8, 3, 1, 5, 8, 2, 6, 8, 1, 4, 7, 5)
LENGTH, VOCAB, PADDED_VOCAB, HIDDEN = max(LENGTHS), 11, 12, 3
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
    """A teacher's full output, with a row per token. Its ranks have parts of it."""

    hidden: Tensor
    head: Head
    lengths: tuple[int, ...]

    @property
    def logits(self) -> Tensor:
        """Logits in plain PyTorch."""
        linear = F.linear(self.hidden, self.head.weight, self.head.bias) * self.head.scale
        assert self.head.soft_cap is not None
        return self.head.soft_cap * torch.tanh(linear / self.head.soft_cap)


def output(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Output:
    random = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64)

    head = Head(tensor(PADDED_VOCAB, HIDDEN), tensor(PADDED_VOCAB), scale=0.7, soft_cap=4.0)
    return Output(tensor(sum(lengths), HIDDEN), head, lengths)


@dataclass
class Ranks:
    """The writers of a teacher's ranks."""

    kind: Kind
    sides: LayoutPair
    writers: list[HiddenStatesWriter | LogitsWriter]

    @classmethod
    def start(cls, kind: Kind, sides: LayoutPair, *, num_slots: int = 1) -> "Ranks":
        hidden_size = HIDDEN if kind == "hidden_states" else None
        payload = Payload(len(LENGTHS), LENGTH, VOCAB, hidden_size, 8)
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

    def write(self, output: Output, micro_batch_size: int = 2, slot: int = 0) -> list[OutputHandle]:
        """Write each rank's part in microbatches, as a forward pass does."""
        teacher = self.sides.teacher
        size = len(output.lengths) // teacher.dp
        for rank, writer in enumerate(self.writers):
            d, _, _ = teacher.coordinates(rank)
            sequences = range(d * size, (d + 1) * size)
            first = tokens_of(output.lengths, sequences).start
            writer.begin(sum(output.lengths[d * size : (d + 1) * size]), slot)
            for start in sequences[::micro_batch_size]:
                rows = tokens_of(output.lengths, range(start, min(start + micro_batch_size, sequences.stop)))
                writer.write(rows.start - first, self._part(output, rows, head_columns(teacher, rank)))
        return [writer.handle() for writer in self.writers]

    def _part(self, output: Output, rows: slice, columns: range) -> TensorLogits | HeadLogits:
        cut = slice(columns.start, columns.stop)
        if self.kind == "logits":
            return TensorLogits(output.logits[None, rows, cut])
        head = output.head
        return HeadLogits(output.hidden[None, rows], Head(head.weight[cut], head.bias[cut], head.scale, head.soft_cap))

    def close(self) -> None:
        for writer in self.writers:
            writer.close()


def head_columns(teacher: Layout, rank: int) -> range:
    """Return the columns of a rank's shard of the padded head, as torch cuts it."""
    chunks = torch.arange(PADDED_VOCAB).chunk(teacher.tp)
    columns = chunks[teacher.coordinates(rank)[2]].tolist()
    return range(columns[0], columns[-1] + 1)


def receivers(stack: ExitStack, number: int) -> list[CountingReceiver]:
    return [stack.enter_context(CountingReceiver(rank)) for rank in range(number)]


def tokens_of(lengths: Sequence[int], sequences: range) -> slice:
    """Return the tokens of consecutive sequences."""
    return slice(sum(lengths[: sequences.start]), sum(lengths[: sequences.stop]))


def own_tokens(sides: LayoutPair, student_rank: int, lengths: tuple[int, ...] = LENGTHS) -> slice:
    """Return the rows of the full output that are in a student rank's window."""
    size = len(lengths) // sides.student.dp
    d, _, _ = sides.student.coordinates(student_rank)
    return tokens_of(lengths, range(d * size, (d + 1) * size))


def read(window: Window, receiver: Receiver, sequences: slice = slice(None)) -> Tensor:
    """Return the logits [n, VOCAB] of the tokens of some of the window's sequences."""
    rows = window.rows(receiver, sequences, LENGTH)
    return rows.read(packing_of(*lengths_of(window)[sequences], width=LENGTH).tokens, VOCAB)


def lengths_of(window: Window) -> tuple[int, ...]:
    return (window.hidden if isinstance(window, HiddenStatesWindow) else window.shards[0]).lengths
