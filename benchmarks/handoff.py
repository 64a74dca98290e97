"""What a teacher hands over for a batch: logits against final hidden states, through the run's own transport.

uv run benchmarks/handoff.py                   # writes benchmarks/results/handoff.md and handoff.json

The heads are those of published models by their shapes, with random numbers; in bf16, by shared memory on a CPU and by
CUDA IPC on a GPU. Sender and receiver are two processes.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from dataclasses import asdict, dataclass
from datetime import date
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from demo import ROOT, commit, hardware
from rich.console import Console

from nemo_opd.handoff.hidden_states import HiddenStatesHandle, HiddenStatesWriter
from nemo_opd.handoff.logits import LogitsHandle, LogitsWriter
from nemo_opd.handoff.transport import TRANSPORTS
from nemo_opd.losses.logit_rows import Head, HeadLogits, TensorLogits

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


def teacher(pipe: Connection, shape: Shape, kind: str, tokens: int, repeats: int) -> None:
    """The sending process: makes the output once and hands it over again and again."""
    torch.set_num_threads(1)
    new_sender, _ = TRANSPORTS[TRANSPORT]
    hidden = torch.randn(1, tokens, shape.hidden_size).to(DEVICE, torch.bfloat16)
    weight = torch.randn(shape.vocab_size, shape.hidden_size).to(DEVICE, torch.bfloat16)
    made: HeadLogits | TensorLogits = HeadLogits(hidden, Head(weight))
    writer: HiddenStatesWriter | LogitsWriter
    if kind == "logits":
        made = TensorLogits(torch.randn(1, tokens, shape.vocab_size, dtype=torch.bfloat16, device=DEVICE))
        writer = LogitsWriter(new_sender(), shape.vocab_size, torch.bfloat16)
    else:
        writer = HiddenStatesWriter(new_sender, shape.vocab_size, shape.hidden_size, torch.bfloat16)
    for _ in range(repeats):
        began = time.perf_counter()
        writer.begin(1, tokens)
        writer.write(0, made)  # type: ignore[arg-type]
        handle = writer.handle()
        pipe.send((handle, time.perf_counter() - began))
        pipe.recv()
    writer.close()


def measure(shape: Shape, kind: str, tokens: int, repeats: int) -> Row:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=teacher, args=(theirs, shape, kind, tokens, repeats))
    process.start()
    _, new_receiver = TRANSPORTS[TRANSPORT]
    writes, reads = [], []
    with new_receiver() as receiver:
        for _ in range(repeats):
            handle, seconds = ours.recv()
            writes.append(seconds)
            began = time.perf_counter()
            handle.rows(receiver, slice(None), tokens)
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
        return handle.logits.num_bytes, 0
    return handle.hidden.num_bytes, handle.weight.num_bytes


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
    rows = [
        measure(shape, kind, options.tokens, options.repeats)
        for shape in SHAPES
        for kind in ("logits", "hidden_states")
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
    record = {"facts": facts, "rows": [asdict(row) for row in rows]}
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
        ]
    )
    (options.output / "handoff.md").write_text(text, encoding="utf-8")
    Console(soft_wrap=True).print(text, markup=False)


if __name__ == "__main__":
    main()
