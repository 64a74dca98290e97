"""Every loss against its naive formulation in PyTorch, and against TRL and Liger-Kernel where installed, in one run.

uv run benchmarks/losses.py                                       # writes benchmarks/results/losses.*
uv run --with trl --with liger-kernel benchmarks/losses.py        # the same, with what others have
uv run benchmarks/losses.py --large                               # and memory at 2,048 positions, 128,256 tokens

Cross-tokenizer losses use real tokenizers from NEMO_OPD_TOKENIZERS (a folder of folders) and text from
NEMO_OPD_CORPUS (the folder of multidomain.jsonl), else the demo's tokenizers. On a GPU where there is one.
"""

import os

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # Read when torch is imported; the memory recorder logs every start.

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from pathlib import Path

import losses_large
import losses_third_party
import losses_two_heads
import torch
from alignment import Grid
from demo import ROOT, commit, hardware
from losses_cases import Case, Text, cross_entropy_case, cross_tokenizer_cases, same_vocab_cases, units_of
from losses_large import Growth
from losses_measure import Memory, interleaved, median_ratio, memory
from losses_texts import DEMO_PAIR, logits, real_text
from losses_two_heads import Heads
from rich.console import Console
from rich.progress import track
from torch import Tensor

OURS, NAIVE, FLOOR = "nemo_opd", "naive", "GEMM floor"
WIDTH = 130
"""Columns of the widest table, which no terminal or pipe should break."""
MIB = 2**20
NOTES = """\
* **ms**: forward and backward to the logits, the median of the rounds; ours and the other take turns within a round.
  **ratio**: the median over rounds of ours / the other, so below 1 ours is faster.
* **peak**: the most that tensors take above the inputs, in forward or backward, the returned gradient included: every
  allocation and release of PyTorch's (`profile_memory`; on a GPU `max_memory_allocated`), so it is exact, repeatable
  and blind to what an operator takes past the allocator.
* **saved**: what autograd keeps for backward (`saved_tensors_hooks`, each storage once), in units of the bf16 logits.
* Memory is measured with bf16 logits. **naive** is autograd on whole rows in fp32 (`benchmarks/losses_naive_*.py`);
  the test suite holds it equal to ours in value and gradient. Its index tensors and chunks are made beforehand and
  not timed, ours are."""


@dataclass(frozen=True)
class Row:
    """Two formulations of one loss on the same logits."""

    name: str
    rival: str
    ms: dict[str, tuple[float, float, float]]
    """By dtype of the logits: ours, the other, the median ratio."""
    ours: Memory
    other: Memory
    logits_bytes: int
    """Of the student's bf16 logits."""


@dataclass(frozen=True)
class HeadsRow:
    """One way to a loss from hidden states."""

    name: str
    ms: float
    to_floor: float
    """The median ratio to the matrix products alone."""
    memory: Memory


@dataclass(frozen=True)
class Found:
    """All that was measured."""

    rows: list[Row]
    others: list[Row]
    """Against other packages."""
    heads: list[HeadsRow]
    large: list[Growth]
    facts: dict[str, str]


@dataclass(frozen=True)
class Size:
    """Shapes of the logits of a case."""

    positions: int
    vocab: int
    teacher_positions: int
    teacher_vocab: int

    @staticmethod
    def of(text: Text) -> "Size":
        sizes = text.projection.student_vocab_size, text.projection.teacher_vocab_size
        return Size(text.student_ids.shape[1], sizes[0], text.teacher_ids.shape[1], sizes[1])


def compare(case: Case, rival: str, size: Size, dtypes: list[torch.dtype], repeats: int, device: torch.device) -> Row:
    """Times in every dtype, memory in bf16."""
    ms = {}
    for dtype in dtypes:
        student, teacher = _logits(size, dtype, device)
        steps = {OURS: lambda: case.ours(student, teacher), rival: lambda: case.naive(student, teacher)}  # noqa: B023
        times = interleaved(steps, [student], repeats)
        ours, other = times[OURS], times[rival]
        ms[str(dtype).removeprefix("torch.")] = (ours.median_ms, other.median_ms, median_ratio(ours, other))
    student, teacher = _logits(size, torch.bfloat16, device)
    used = [memory(lambda: of(student, teacher), [student], [student, teacher]) for of in (case.ours, case.naive)]  # noqa: B023
    return Row(case.name, rival, ms, used[0], used[1], student.nbytes)


def _logits(size: Size, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    student = logits(size.positions, size.vocab, 0, dtype).to(device).requires_grad_()
    return student, logits(size.teacher_positions, size.teacher_vocab, 1, dtype).to(device)


def compare_heads(heads: Heads, ways: dict[str, losses_two_heads.HeadsLoss], repeats: int) -> list[HeadsRow]:
    steps = {name: (lambda of=of: of(heads)) for name, of in {**ways, FLOOR: losses_two_heads.gemm_floor}.items()}
    times = interleaved(steps, heads.leaves, repeats)
    floor = times.pop(FLOOR)
    rows = [
        HeadsRow(
            name,
            own.median_ms,
            median_ratio(own, floor),
            memory(steps[name], heads.leaves, heads.inputs, count_saved=False),
        )
        for name, own in times.items()
    ]
    return [*rows, HeadsRow(FLOOR, floor.median_ms, 1.0, Memory(0, 0, 0, 0, 0))]


def measure(options: argparse.Namespace, device: torch.device) -> Found:
    dtypes = [torch.float32, torch.bfloat16] if device.type == "cpu" else [torch.bfloat16]
    mask = torch.ones(1, options.positions, dtype=torch.bool, device=device)
    ids = torch.randint(options.vocab, (1, options.positions), generator=torch.Generator().manual_seed(2)).to(device)
    text = real_text(*_pair(options), options.corpus, options.pair_positions).to(device)
    square = Size(options.positions, options.vocab, options.positions, options.vocab)
    cases = [
        *((case, square) for case in [*same_vocab_cases(mask, options.top_k), cross_entropy_case(ids, mask)]),
        *((case, Size.of(text)) for case in cross_tokenizer_cases(text, options.top_k)),
    ]
    wanted = [(case, size) for case, size in cases if not options.only or any(o in case.name for o in options.only)]
    rows = [
        compare(case, NAIVE, size, dtypes, options.repeats, device)
        for case, size in track(wanted, "losses", console=Console(stderr=True), transient=True)
    ]
    rivals = losses_third_party.find(mask, device)
    others, heads = [], []
    if not options.only:
        plain = losses_third_party.one_to_one(text)
        of_text = losses_third_party.gold_cases(plain) if rivals.has_trl else []
        theirs = [*((*pair, square) for pair in rivals.of_logits), *((*pair, Size.of(plain)) for pair in of_text)]
        others = [compare(case, rival, size, dtypes, options.repeats, device) for rival, case, size in theirs]
        sizes = (options.positions, options.vocab, tuple(options.widths))
        ways = {OURS: losses_two_heads.ours, NAIVE: losses_two_heads.naive, **rivals.of_heads}
        heads = compare_heads(Heads.random(*sizes, dtypes[0], device), ways, options.repeats)
    projection = text.projection if options.large else None
    large = losses_large.measure(options.large_positions, 128_256, projection, device) if options.large else []
    return Found(rows, others, heads, large, {**_facts(options, device, text), **rivals.absent})


def _pair(options: argparse.Namespace) -> tuple[str, str]:
    if options.tokenizers is None:
        return DEMO_PAIR
    student, _, teacher = options.pair.partition(":")
    return str(options.tokenizers / student), str(options.tokenizers / teacher)


def _facts(options: argparse.Namespace, device: torch.device, text: Text) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else hardware()
    size = Size.of(text)
    pair = " → ".join(Path(folder).name for folder in _pair(options))
    return {
        "hardware": f"{name}, {torch.get_num_threads()} threads",
        "torch": version("torch"),
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": " ".join(["uv run benchmarks/losses.py", *sys.argv[1:]]),
        "one vocabulary": f"{options.positions:,} positions, {options.vocab:,} tokens",
        "two vocabularies": f"{pair}: {size.positions:,} and {size.teacher_positions:,} positions of "
        f"{size.vocab:,} and {size.teacher_vocab:,} tokens, {len(units_of(text)):,} chunks",
        "hidden states": f"{options.positions:,} positions, widths {options.widths[0]:,} and {options.widths[1]:,}",
        "rounds": str(options.repeats),
    }


def grids(found: Found) -> list[Grid]:
    tables = [_row_grid(f"Against naive PyTorch ({dtype})", found.rows, dtype) for dtype in _dtypes(found.rows)]
    tables += [_row_grid(f"Against other packages ({dtype})", found.others, dtype) for dtype in _dtypes(found.others)]
    tables.append(_memory_grid("Memory", [*found.rows, *found.others]))
    if found.heads:
        tables.append(_heads_grid(found.heads))
    if found.large:
        tables.append(_large_grid(found.large))
    return tables


def _dtypes(rows: list[Row]) -> list[str]:
    return list(rows[0].ms) if rows else []


def _row_grid(title: str, rows: list[Row], dtype: str) -> Grid:
    cells = [
        [row.name, row.rival, *(f"{value:.1f}" for value in row.ms[dtype][:2]), f"{row.ms[dtype][2]:.2f}"]
        for row in rows
    ]
    return Grid(title, ["loss", "other", "ours, ms", "other, ms", "ratio"], cells)


def _memory_grid(title: str, rows: list[Row]) -> Grid:
    cells = [
        [
            row.name,
            row.rival,
            *(f"{own.peak / MIB:,.0f}" for own in (row.ours, row.other)),
            *(f"{own.saved / row.logits_bytes:.2f}" for own in (row.ours, row.other)),
        ]
        for row in rows
    ]
    return Grid(title, ["loss", "other", "peak, MiB", "other", "saved", "other"], cells)


def _heads_grid(rows: list[HeadsRow]) -> Grid:
    cells = [
        [row.name, "jsd", f"{row.ms:,.1f}", f"{row.to_floor:.2f}", f"{row.memory.peak / MIB:,.0f}"] for row in rows
    ]
    return Grid("From hidden states", ["way", "loss", "ms", "to floor", "peak, MiB"], cells)


def _large_grid(rows: list[Growth]) -> Grid:
    cells = [
        [
            row.name,
            f"{row.positions:,}",
            f"{row.logits / MIB:,.0f}",
            f"{row.memory.saved / row.logits:.3f}",
            f"{row.memory.forward_transient / MIB:,.0f}",
            f"{(row.memory.peak - row.memory.gradient) / MIB:,.0f}",
            "" if row.resident is None else f"{(row.resident - row.memory.gradient) / MIB:,.0f}",
        ]
        for row in rows
    ]
    columns = ["loss", "positions", "logits, MiB", "saved", "forward", "peak", "resident"]
    return Grid("Growth with the sequence, bf16", columns, cells)


def write(output: Path, tables: list[Grid], found: Found) -> None:
    """losses.md for reading; losses.json with every figure behind it."""
    described = "\n".join(f"* {name}: {value}" for name, value in found.facts.items())
    text = "\n".join(
        ["# Losses: ours, naive PyTorch, and other packages", "", NOTES, "", *map(Grid.markdown, tables), described]
    )
    output.mkdir(parents=True, exist_ok=True)
    (output / "losses.md").write_text(text + "\n", encoding="utf-8")
    (output / "losses.json").write_text(
        json.dumps(asdict(found), indent=1, ensure_ascii=False) + "\n", encoding="utf-8"
    )


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizers", type=Path, default=os.environ.get("NEMO_OPD_TOKENIZERS"))
    corpus = os.environ.get("NEMO_OPD_CORPUS")
    parser.add_argument("--corpus", type=Path, default=Path(corpus) / "multidomain.jsonl" if corpus else None)
    parser.add_argument("--pair", default="llama3_1:qwen3", metavar="STUDENT:TEACHER", help="folders of --tokenizers")
    parser.add_argument("--positions", type=int, default=256, help="of the losses of one vocabulary")
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--pair-positions", type=int, default=64, help="student tokens of the cross-tokenizer losses")
    parser.add_argument("--widths", type=int, nargs=2, default=[512, 768], metavar=("STUDENT", "TEACHER"))
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", nargs="+", metavar="PART", help="losses with such a part in their name")
    parser.add_argument("--large", action="store_true", help="memory at full size: needs 8 GB and some minutes")
    parser.add_argument("--large-positions", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    return parser.parse_args()


def main() -> None:
    options = arguments()
    found = measure(options, torch.device(options.device))
    tables = grids(found)
    write(options.output, tables, found)
    console = Console(width=max(WIDTH, Console().width))
    for table in tables:
        console.print(table.rich())
    console.print("\n".join(f"{name}: {value}" for name, value in found.facts.items()))


if __name__ == "__main__":
    main()
