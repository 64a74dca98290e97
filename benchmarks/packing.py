"""Sequences packed by tokens, against padded ones a fixed number at a time: positions, balance of ranks, and time.

uv run benchmarks/packing.py            # writes benchmarks/results/packing.md and packing.json

Lengths are drawn as those of web pages are, log-normal. The time is that of a decoder with random weights, forward and
backward. On a GPU where there is one.
"""

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
from alignment import Grid
from demo import ROOT, commit, hardware
from losses_measure import interleaved, median_ratio
from rich.console import Console
from step_models import PRESETS
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_opd.logits.packed import Packing
from nemo_opd.models.head import Headless
from nemo_opd.training.micro_batches import dealt, micro_batches
from nemo_opd.types import TokenRows

MEDIAN, SPREAD = 400, 1.2
"""Of the lengths of web pages in tokens: their median, and the standard deviation of the logarithm."""
SEED = 0


@dataclass(frozen=True)
class Counts:
    """Of one optimizer step, as the median over steps."""

    sequences: int
    longest: int
    padded: float
    """Share of the computed positions that are tokens, with a fixed number of padded sequences at a time."""
    padded_micro_batches: int
    """Of a rank."""
    micro_batches: int
    in_order: float
    """Tokens of the rank that has most, as a multiple of the mean."""
    dealt: float


@dataclass(frozen=True)
class Times:
    lengths: str
    padded_ms: float
    packed_ms: float
    ratio: float
    """The median over rounds of the packed time over the padded one."""
    tokens: float
    """Tokens as a share of padded positions: the ratio of what is linear in positions."""


def web(number: int, longest: int) -> list[int]:
    """Draw lengths, cut at `longest`."""
    draw = random.Random(SEED)
    return [min(longest, max(1, round(math.exp(draw.gauss(math.log(MEDIAN), SPREAD))))) for _ in range(number)]


def counts(lengths: Sequence[int], longest: int, options: argparse.Namespace) -> Counts:
    steps = [lengths[i : i + options.batch] for i in range(0, len(lengths) - options.batch + 1, options.batch)]
    found = [of_step(step, longest, options) for step in steps]
    medians = [statistics.median(column) for column in zip(*found, strict=True)]
    padded, padded_number, number, in_order, balanced = medians
    return Counts(options.batch, longest, padded, int(padded_number), int(number), in_order, balanced)


def of_step(lengths: Sequence[int], longest: int, options: argparse.Namespace) -> tuple[float, int, int, float, float]:
    size = len(lengths) // options.ranks
    in_order = [lengths[i : i + size] for i in range(0, len(lengths), size)]
    order = dealt([[length] for length in lengths], [size] * options.ranks)
    balanced = [[lengths[i] for i in order[start : start + size]] for start in range(0, len(order), size)]
    positions = sum(
        len(part) * max(part)
        for rank in in_order
        for part in (rank[i : i + options.micro] for i in range(0, size, options.micro))
    )
    cuts = micro_batches(balanced, options.micro * longest, is_packed=True)
    mean = sum(lengths) / options.ranks
    return (
        sum(lengths) / positions,
        -(-size // options.micro),
        len(cuts[0]),
        max(map(sum, in_order)) / mean,
        max(map(sum, balanced)) / mean,
    )


def times(name: str, lengths: Sequence[int], options: argparse.Namespace) -> Times:
    """Forward and backward over one microbatch of padded sequences, and over the same ones packed."""
    torch.manual_seed(SEED)
    config = PRESETS[options.model]()
    config.vocab_size = 1024
    dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
    model = AutoModelForCausalLM.from_config(config).to(options.device, dtype)
    own = list(lengths[: options.micro])
    ids = torch.randint(1, config.vocab_size, (len(own), max(own)))
    packing = Packing.of(TokenRows(ids, torch.tensor(own), ids.bool(), ids.int())).to(options.device)
    ids = ids.to(options.device)

    def step(is_packed: bool) -> Callable[[], Tensor]:
        source = Headless(model, key="student.model")
        assert source.reads_packed
        source.reads_packed = is_packed
        return lambda: source(ids, packing).hidden.float().square().mean()

    steps = {"padded": step(False), "packed": step(True)}
    found = interleaved(steps, list(model.parameters()), options.repeats)
    ratio = median_ratio(found["packed"], found["padded"])
    return Times(name, found["padded"].median_ms, found["packed"].median_ms, ratio, sum(own) / ids.numel())


def counts_grid(rows: list[Counts]) -> Grid:
    names = ["longest", "useful, padded", "useful, packed", "microbatches, padded", "packed"]
    cells = [
        [
            f"{row.longest:,}",
            f"{row.padded:.0%}",
            "100%",
            str(row.padded_micro_batches),
            str(row.micro_batches),
            f"{row.in_order:.2f}",
            f"{row.dealt:.2f}",
        ]
        for row in rows
    ]
    return Grid("A step of all ranks", [*names, "most loaded rank, in order", "dealt"], cells)


def times_grid(rows: list[Times]) -> Grid:
    cells = [
        [row.lengths, f"{row.padded_ms:,.0f}", f"{row.packed_ms:,.0f}", f"{row.ratio:.2f}", f"{row.tokens:.2f}"]
        for row in rows
    ]
    return Grid("A microbatch, forward and backward", ["lengths", "padded, ms", "packed, ms", "ratio", "tokens"], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256, help="sequences of a step")
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro", type=int, default=8, help="sequences at a time")
    parser.add_argument("--longest", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--model", choices=PRESETS, default="llama_tiny")
    parser.add_argument("--timed-longest", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted = [counts(web(32 * options.batch, longest), longest, options) for longest in options.longest]
    timed = [
        times(f"web, up to {options.timed_longest}", web(options.micro, options.timed_longest), options),
        times(f"all {options.timed_longest}", [options.timed_longest] * options.micro, options),
    ]
    name = hardware() if options.device == "cpu" else torch.cuda.get_device_name()
    facts = {
        "hardware": f"{name}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": "uv run benchmarks/packing.py",
        "web": f"log-normal lengths, median {MEDIAN} tokens, standard deviation of the logarithm {SPREAD}",
        "step": f"{options.batch} sequences on {options.ranks} ranks, median over steps; padded: {options.micro} at a "
        f"time, in order; packed: up to {options.micro} · longest tokens at a time",
        "time": f"{options.model}, {options.micro} sequences, the median of rounds that take turns",
    }
    tables = [counts_grid(counted), times_grid(timed)]
    described = "\n".join(f"* {key}: {value}" for key, value in facts.items())
    options.output.mkdir(parents=True, exist_ok=True)
    text = "# Packed sequences\n\n" + "\n".join(table.markdown() for table in tables) + f"\n{described}\n"
    (options.output / "packing.md").write_text(text, encoding="utf-8")
    found = {"facts": facts, "counts": list(map(asdict, counted)), "times": list(map(asdict, timed))}
    (options.output / "packing.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for table in tables:
        Console(width=160).print(table.rich())


if __name__ == "__main__":
    main()
