"""What a teacher hands over for a batch: logits against final hidden states, through the run's own transport.

uv run benchmarks/handoff.py                   # writes benchmarks/results/handoff.md and handoff.json

The heads are those of published models by their shapes, with random numbers; in bf16, by shared memory on a CPU and by
CUDA IPC on a GPU. Sender and receiver are two processes. What different layouts of student and teacher make the student
copy is counted with all ranks in one process, by shared memory.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from demo import ROOT, commit, hardware
from rich.console import Console

from nemo_opd.distributed.layout import Layout, Place
from nemo_opd.handoff.outputs import (
    HiddenStatesHandle,
    HiddenStatesWriter,
    LogitsHandle,
    LogitsWriter,
    OutputHandle,
    windows,
)
from nemo_opd.handoff.slices import LayoutPair, Payload, planned_readers, vocabulary_columns
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.rows import TensorLogits

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TRANSPORT = "cuda_ipc" if DEVICE == "cuda" else "shared_memory"
MIB = 2**20


@dataclass(frozen=True)
class Shape:
    name: str
    hidden_size: int
    vocab_size: int


SHAPES = (
    Shape("Llama-3.2-1B", 2048, 128_256),
    Shape("Qwen3-4B", 2560, 151_936),
    Shape("Gemma-3-4B", 2560, 262_208),
)


@dataclass(frozen=True)
class Row:
    model: str
    kind: str
    tokens: int
    batch_mib: float
    """Handed over for each batch."""
    once_mib: float
    """Handed over once: the head."""
    write_ms: float
    """Into the buffer, median of the repeats; the first, which allocates, is not among them."""
    map_ms: float
    """The receiver's first look at a batch."""
    again_ms: float
    """Every later one, median."""


KINDS = ("logits", "hidden_states")
LAYOUTS = (
    (Layout(2), Layout(2)),
    (Layout(2), Layout(1, 1, 2)),
    (Layout(1, 1, 2), Layout(2)),
    (Layout(2), Layout(1, 2, 1)),
)
"""Of student and teacher, on two devices."""
NUM_TEXTS = 4


@dataclass(frozen=True)
class Copies:
    """Of one batch, by all ranks of the student, each reading its window at once."""

    model: str
    kind: str
    student: str
    teacher: str
    read_mib: float
    """Hidden states or logits; the head's shards are read where they are."""
    copied_mib: float
    milliseconds: float
    """Of the slowest rank, median of the repeats; the first, which maps, is not among them."""


def teacher(pipe: Connection, shape: Shape, kind: str, tokens: int, repeats: int) -> None:
    """The sending process: makes the output once and hands it over again and again."""
    torch.set_num_threads(1)
    new_sender, _ = TRANSPORTS[TRANSPORT]
    hidden = torch.randn(1, tokens, shape.hidden_size).to(DEVICE, torch.bfloat16)
    weight = torch.randn(shape.vocab_size, shape.hidden_size).to(DEVICE, torch.bfloat16)
    made: HeadLogits | TensorLogits = HeadLogits(hidden, Head(weight))
    writer: HiddenStatesWriter | LogitsWriter
    columns = range(shape.vocab_size)
    if kind == "logits":
        made = TensorLogits(torch.randn(1, tokens, shape.vocab_size, dtype=torch.bfloat16, device=DEVICE))
        writer = LogitsWriter(new_sender, shape.vocab_size, torch.bfloat16, columns=columns)
    else:
        writer = HiddenStatesWriter(new_sender, shape.vocab_size, shape.hidden_size, torch.bfloat16, columns=columns)
    for _ in range(repeats):
        began = time.perf_counter()
        writer.begin(tokens)
        writer.write(0, made)
        handle = writer.handle()
        pipe.send((handle, time.perf_counter() - began))
        pipe.recv()
    writer.close()


def measure(shape: Shape, kind: str, tokens: int, repeats: int) -> Row:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=teacher, args=(theirs, shape, kind, tokens, repeats))
    process.start()
    # Otherwise a sender that fails would leave this end waiting.
    theirs.close()
    _, new_receiver = TRANSPORTS[TRANSPORT]
    sides = colocated(Layout(1), Layout(1))
    writes, reads = [], []
    with new_receiver() as receiver:
        for _ in range(repeats):
            handle, seconds = ours.recv()
            writes.append(seconds)
            began = time.perf_counter()
            windows([handle], sides, [tokens])[0].rows(receiver, slice(None), tokens)
            reads.append(time.perf_counter() - began)
            ours.send("done")
    process.join()
    batch, once = num_bytes(handle)
    return Row(
        shape.name,
        kind,
        tokens,
        batch / MIB,
        once / MIB,
        1e3 * statistics.median(writes[1:]),
        1e3 * reads[0],
        1e3 * statistics.median(reads[1:]),
    )


def num_bytes(handle: HiddenStatesHandle | LogitsHandle) -> tuple[int, int]:
    """Of a batch, and once."""
    if isinstance(handle, LogitsHandle):
        return handle.output.num_bytes, 0
    assert handle.head is not None
    return handle.output.num_bytes, handle.head.weight.num_bytes


def copies(shape: Shape, kind: str, student: Layout, teacher: Layout, tokens: int, repeats: int) -> Copies:
    sides = colocated(student, teacher)
    _, new_receiver = TRANSPORTS["shared_memory"]
    lengths = [tokens // NUM_TEXTS] * NUM_TEXTS
    with ExitStack() as stack:
        receivers = [stack.enter_context(new_receiver(rank)) for rank in range(student.size)]
        handles = written(stack, shape, kind, sides, tokens)
        seconds = []
        for _ in range(repeats):
            by_rank = []
            for window, receiver in zip(windows(handles, sides, lengths), receivers, strict=True):
                receiver.copied_bytes = 0
                began = time.perf_counter()
                window.rows(receiver, slice(None), tokens // NUM_TEXTS)
                by_rank.append(time.perf_counter() - began)
            seconds.append(max(by_rank))
        copied = sum(receiver.copied_bytes for receiver in receivers)
    width = shape.vocab_size if kind == "logits" else shape.hidden_size
    read = student.cp * student.tp * tokens * width * torch.bfloat16.itemsize
    milliseconds = 1e3 * statistics.median(seconds[1:])
    return Copies(shape.name, kind, named(student), named(teacher), read / MIB, copied / MIB, milliseconds)


def written(stack: ExitStack, shape: Shape, kind: str, sides: LayoutPair, tokens: int) -> list[OutputHandle]:
    """What each of the teacher's ranks hands over of a batch; zeros, which are copied like any number."""
    layout, length = sides.teacher, tokens // NUM_TEXTS
    new_sender, _ = TRANSPORTS["shared_memory"]
    payload = Payload(NUM_TEXTS, length, shape.vocab_size, None if kind == "logits" else shape.hidden_size, 2)
    shards = vocabulary_columns(shape.vocab_size, layout.tp)
    zero, handles = torch.zeros((), dtype=torch.bfloat16), []
    for rank, readers in enumerate(planned_readers(sides, payload)):
        _, _, t = layout.coordinates(rank)
        columns, rows = shards[t], NUM_TEXTS // layout.dp
        writer: HiddenStatesWriter | LogitsWriter
        made: HeadLogits | TensorLogits
        if kind == "logits":
            writer = LogitsWriter(new_sender, shape.vocab_size, zero.dtype, columns=columns, readers=readers)
            made = TensorLogits(zero.expand(1, rows * length, len(columns)))
        else:
            writer = HiddenStatesWriter(
                new_sender, shape.vocab_size, shape.hidden_size, zero.dtype, columns=columns, readers=readers
            )
            head = Head(zero.expand(len(columns), shape.hidden_size))
            made = HeadLogits(zero.expand(1, rows * length, shape.hidden_size), head)
        stack.enter_context(closing(writer))
        writer.begin(rows * length)
        writer.write(0, made)
        handles.append(writer.handle())
    return handles


def colocated(student: Layout, teacher: Layout) -> LayoutPair:
    """Return both on the devices of one node, rank by rank."""
    return LayoutPair(student, teacher, *(tuple(Place(0, i) for i in range(each.size)) for each in (student, teacher)))


def named(layout: Layout) -> str:
    sizes = (("dp", layout.dp), ("cp", layout.cp), ("tp", layout.tp))
    return " ".join(f"{name}={size}" for name, size in sizes if size > 1) or "1 rank"


def copies_table(rows: list[Copies]) -> str:
    lines = [
        "| head | handed over | student | teacher | MiB read | MiB copied | ms |",
        "|---|---|---|---|---:|---:|---:|",
    ]
    lines += [
        f"| {row.model} | {row.kind} | {row.student} | {row.teacher} | {row.read_mib:,.1f} | {row.copied_mib:,.1f} | "
        f"{row.milliseconds:.2f} |"
        for row in rows
    ]
    return "\n".join(lines)


def table(rows: list[Row]) -> str:
    lines = [
        "| head | handed over | MiB a batch | MiB once | logits / this | write, ms | first map, ms | later, ms |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
    ]
    logits = {row.model: row.batch_mib for row in rows if row.kind == "logits"}
    for row in rows:
        ratio = logits[row.model] / row.batch_mib
        lines.append(
            f"| {row.model} | {row.kind} | {row.batch_mib:,.1f} | {row.once_mib:,.0f} | {ratio:.1f} | "
            f"{row.write_ms:.1f} | {row.map_ms:.2f} | {row.again_ms:.3f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="of a batch")
    parser.add_argument("--repeats", type=int, default=6)
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    rows = [measure(shape, kind, options.tokens, options.repeats) for shape in SHAPES for kind in KINDS]
    copied = [
        copies(SHAPES[0], kind, student, teacher, options.tokens, options.repeats)
        for kind in KINDS
        for student, teacher in LAYOUTS
    ]
    facts = {
        "hardware": hardware(),
        "device": torch.cuda.get_device_name() if DEVICE == "cuda" else "CPU",
        "transport": TRANSPORT,
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": "uv run benchmarks/handoff.py",
        "tokens": options.tokens,
    }
    options.output.mkdir(parents=True, exist_ok=True)
    record = {
        "facts": facts,
        "rows": [asdict(row) for row in rows],
        "copies": [asdict(row) for row in copied],
    }
    (options.output / "handoff.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    text = "\n".join(
        [
            "# What a teacher hands over for a batch",
            "",
            *(f"* {name}: {value}" for name, value in facts.items()),
            "",
            table(rows),
            "",
            "A receiver maps a buffer once and copies nothing: **later** is what it takes to find the mapping again.",
            "",
            "## What the student copies",
            "",
            f"{NUM_TEXTS} texts, student and teacher on the same two devices. Equal layouts are read where "
            "they are, and so are the columns of several ranks, side by side; rows and positions of several ranks "
            "are put together, microbatch by microbatch where one of them spans several. Here each rank reads all of "
            "its rows at once.",
            "",
            copies_table(copied),
            "",
        ]
    )
    (options.output / "handoff.md").write_text(text, encoding="utf-8")
    Console(soft_wrap=True).print(text, markup=False)


if __name__ == "__main__":
    main()
