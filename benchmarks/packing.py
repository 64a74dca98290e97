"""Sequences packed by tokens, and rows of documents, against padded sequences: positions, text read, ranks, and time.

uv run benchmarks/packing.py            # writes benchmarks/results/packing.md and packing.json

Real texts and tokenizers are measured where NEMO_OPD_CORPUS and NEMO_OPD_TOKENIZERS name their folders. Other lengths
are drawn as those of web pages are, log-normal. The time is that of a decoder with random weights, forward and
backward; on a GPU where there is one.
"""

import argparse
import json
import math
import os
import random
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import numpy as np
import torch
from alignment import Grid
from demo import ROOT, commit, hardware
from losses_measure import interleaved, median_ratio
from numpy.typing import NDArray
from rich.console import Console
from step_models import PRESETS
from torch import Tensor
from transformers import AutoModelForCausalLM

from nemo_opd.cluster.batch_grid import dealt, micro_batches
from nemo_opd.data.encoders import Encoder
from nemo_opd.data.order import Lengths, PackedOrder, lengths_of
from nemo_opd.data.text import TextSampleMaker, TextWindowMaker, window_edges
from nemo_opd.logits.sources import Packing
from nemo_opd.models.causal_model import HiddenStateModel
from nemo_opd.models.load import load_tokenizer
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
class Filling:
    """Rows of documents, `data.packing`, against one sequence for each document, which is cut."""

    documents: str
    number: int
    longest: int
    """Tokens of a row."""
    read_when_cut: float
    """Share of the student's tokens that are read where documents are cut."""
    read: float
    """That in rows of windows; above 1 where windows begin with a token of their own."""
    useful: float
    """Share of the positions of rows that are tokens."""


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


def drawn_documents(number: int, longest: int) -> Filling:
    whole = np.array(web(number, 10**9))
    lengths = [np.diff(window_edges(np.ones(tokens, np.bool_), longest, 0)) for tokens in whole.tolist()]
    return filling("web, log-normal", lengths, whole, longest)


def real_documents(texts: Sequence[str], tokenizers: Path, longest: int) -> Filling:
    encoder = Encoder.of(load_tokenizer(str(tokenizers / "llama3_1"), key="--tokenizers"), longest, append_eos=True)
    windows_of = TextWindowMaker(TextSampleMaker(encoder, ()))
    lengths = [lengths_of(windows_of(text)) for text in texts]
    whole = np.array([len(encoder(text).ids) for text in texts])
    return filling("shared corpus, Llama", lengths, whole, longest)


def filling(name: str, lengths: Sequence[Lengths], whole: NDArray[np.int64], longest: int) -> Filling:
    """lengths: tokens of the windows of each document; whole: tokens of each document."""
    tokens = np.concatenate(lengths).sum()
    rows = PackedOrder(len(lengths), 1, SEED, True, longest).num_batches(0, lengths)
    return Filling(
        name,
        len(lengths),
        longest,
        float(np.minimum(whole, longest).sum() / whole.sum()),
        float(tokens / whole.sum()),
        float(tokens / (rows * longest)),
    )


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
        source = HiddenStateModel(model, key="student.model")
        assert source.reads_packed
        source.reads_packed = is_packed
        return lambda: source(ids, packing).hidden.float().square().mean()

    steps = {"padded": step(False), "packed": step(True)}
    found = interleaved(steps, list(model.parameters()), options.repeats)
    ratio = median_ratio(found["packed"], found["padded"])
    return Times(name, found["padded"].median_ms, found["packed"].median_ms, ratio, sum(own) / ids.numel())


def filling_grid(rows: list[Filling]) -> Grid:
    names = ["documents", "number", "row", "read when cut", "read", "useful"]
    cells = [
        [
            row.documents,
            f"{row.number:,}",
            f"{row.longest:,}",
            *(f"{share:.1%}" for share in (row.read_when_cut, row.read, row.useful)),
        ]
        for row in rows
    ]
    return Grid("Rows of documents", names, cells)


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
    parser.add_argument("--documents", type=int, default=20_000, help="documents that are put into rows")
    parser.add_argument("--corpus", type=Path, default=os.environ.get("NEMO_OPD_CORPUS"))
    parser.add_argument("--tokenizers", type=Path, default=os.environ.get("NEMO_OPD_TOKENIZERS"))
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--micro", type=int, default=8, help="sequences at a time")
    parser.add_argument("--longest", type=int, nargs="+", default=[2048, 4096])
    parser.add_argument("--longest-of-corpus", type=int, nargs="+", default=[256, 512], help="of the real texts")
    parser.add_argument("--model", choices=PRESETS, default="llama_tiny")
    parser.add_argument("--timed-longest", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    counted = [counts(web(32 * options.batch, longest), longest, options) for longest in options.longest]
    filled = [drawn_documents(options.documents, longest) for longest in options.longest]
    if not (options.corpus and options.tokenizers):
        print("no rows of real texts: give --corpus and --tokenizers", file=sys.stderr)
    else:
        lines = (options.corpus / "multidomain.jsonl").read_text(encoding="utf-8").splitlines()
        texts = [json.loads(line)["text"] for line in lines]
        filled += [real_documents(texts, options.tokenizers, longest) for longest in options.longest_of_corpus]
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
        "command": shlex.join(["uv", "run", *sys.argv]),
        "web": f"log-normal lengths, median {MEDIAN} tokens, standard deviation of the logarithm {SPREAD}",
        "rows": "read: of the tokens, with those that windows begin with; useful: of the positions of rows",
        "step": f"{options.batch} sequences on {options.ranks} ranks, median over steps; padded: {options.micro} at a "
        f"time, in order; packed: up to {options.micro} · longest tokens at a time",
        "time": f"{options.model}, {options.micro} sequences, the median of rounds that take turns",
    }
    tables = [filling_grid(filled), counts_grid(counted), times_grid(timed)]
    described = "\n".join(f"* {key}: {value}" for key, value in facts.items())
    options.output.mkdir(parents=True, exist_ok=True)
    text = "# Packed sequences\n\n" + "\n".join(table.markdown() for table in tables) + f"\n{described}\n"
    (options.output / "packing.md").write_text(text, encoding="utf-8")
    measured = {"rows": filled, "counts": counted, "times": timed}
    found = {"facts": facts} | {name: [asdict(each) for each in own] for name, own in measured.items()}
    (options.output / "packing.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    for table in tables:
        Console(width=160).print(table.rich())


if __name__ == "__main__":
    main()
