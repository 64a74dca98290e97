"""Steps and validations with a vocabulary of 262,144 tokens against the matrix products that they need.

uv run --with gguf --with pip python -m benchmarks.real_models.originals     # once: both models
uv run benchmarks/large_vocabulary.py                                        # a quarter of an hour, 6 GB of memory

SmolLM2-135M (49,152 tokens) learns from Gemma-3-270M (262,144 tokens) as a run of one process computes it, in fp32 on
one thread of a CPU. The same products are timed alone, in turns with the steps, in CPU seconds of the process. Writes
large_vocabulary.json and large_vocabulary.md into benchmarks/results, or another folder.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from alignment import Grid  # noqa: E402
from demo import commit, hardware  # noqa: E402
from rich.console import Console  # noqa: E402
from step_flops import StepWork  # noqa: E402
from step_ours import Ours, configured  # noqa: E402
from torch import Tensor  # noqa: E402

from benchmarks.real_models.place import Place  # noqa: E402
from benchmarks.real_models.texts import documents, training_texts, write  # noqa: E402
from nemo_opd.models.load import load_config  # noqa: E402
from nemo_opd.preflight.model_info import ModelSize, model_size  # noqa: E402

LOSSES = ("p_kl", "byte_prefix", "gold")
HEAD_ROWS = 256
"""Rows of a product with a head in the yardstick: wider ones are not faster."""
TEXT_BYTES = 40_000
"""Bytes of text from each domain."""


@dataclass(frozen=True)
class Product:
    """count products [m, k] @ [k, n]."""

    m: int
    k: int
    n: int
    count: int = 1

    @property
    def flops(self) -> int:
        return 2 * self.count * self.m * self.k * self.n


@dataclass(frozen=True)
class Row:
    loss: str
    what: str
    seconds: list[float]
    products: list[float]
    """Seconds of the products alone, measured right after each."""
    tflop: float
    peak_gib: float | None = None

    @property
    def ratio(self) -> float:
        return statistics.median(self.ratios)

    @property
    def ratios(self) -> list[float]:
        return [ours / alone for ours, alone in zip(self.seconds, self.products, strict=True)]


def model_products(size: ModelSize, lengths: tuple[int, ...], *, is_trained: bool) -> Iterator[Product]:
    """Yield the products of the layers for texts of these lengths; attention is that of causal scores alone."""
    passes = 3 if is_trained else 1
    for layer in size.layers:
        for rows, columns in (shape for shape in layer.shapes if len(shape) == 2):
            yield Product(sum(lengths), columns, rows, passes)
        for length in lengths:
            scores = length // 2 if layer.window is None else min(length // 2, layer.window)
            yield Product(length, layer.query_width, scores, 2 * passes)


def head_products(size: ModelSize, rows: int, *, is_trained: bool) -> Iterator[Product]:
    """Yield the products with the head: logits, and of a student the gradients of hidden states and weight."""
    for begin in range(0, rows, HEAD_ROWS):
        m = min(HEAD_ROWS, rows - begin)
        yield Product(m, size.hidden_size, size.vocab_size)
        if is_trained:
            yield Product(m, size.vocab_size, size.hidden_size)
            yield Product(size.vocab_size, m, size.hidden_size)


def step_products(student: ModelSize, teacher: ModelSize, work: StepWork, *, is_trained: bool) -> list[Product]:
    """Return the products of a training step, or of a validation batch, which has no backward pass."""
    return [
        *model_products(student, work.student_lengths, is_trained=is_trained),
        *head_products(student, work.student_tokens, is_trained=is_trained),
        *model_products(teacher, work.teacher_lengths[0], is_trained=False),
        *head_products(teacher, work.compared_rows[0], is_trained=False),
    ]


def seconds_of(products: list[Product]) -> float:
    """Return the CPU seconds of these products in fp32, without allocations."""
    largest = [max(getattr(p, a) * getattr(p, b) for p in products) for a, b in (("m", "k"), ("k", "n"), ("m", "n"))]
    left, right, out = (torch.full((size,), 0.5) for size in largest)
    begin = time.process_time()
    for product in products:
        # A weight [out, in] is read transposed, as a linear layer reads it.
        operand = right[: product.k * product.n].view(product.n, product.k).t()
        for _ in range(product.count):
            torch.mm(shaped(left, product.m, product.k), operand, out=shaped(out, product.m, product.n))
    return time.process_time() - begin


def shaped(memory: Tensor, rows: int, columns: int) -> Tensor:
    return memory[: rows * columns].view(rows, columns)


def measure(options: argparse.Namespace, loss: str, texts: Path, scratch: Path) -> list[Row]:
    place = Place(options.place)
    settings = {
        "run": {"name": "large_vocabulary", "output_dir": str(scratch / loss)},
        "train": {
            "max_steps": 1 + options.rounds,
            "global_batch_size": options.texts,
            "micro_batch_size": options.texts,
            "max_length": options.length,
        },
        "student": {"model": str(place.original), "optimizer": {"lr": 1e-5}},
        "teachers": [{"name": "gemma", "type": "cross_tokenizer", "model": str(place.gemma3)}],
        "loss": {"type": loss},
        "data": {"train": {"jsonl_files": [str(texts)]}, "cache": False},
        "cluster": {"device": "cpu", "launcher": "local"},
        "logging": {"console": {"enabled": False}},
    }
    with Ours(configured(settings, options.overrides)) as ours:
        models = ours.config.student.model, ours.config.active_teachers[0].model
        sizes = [model_size(load_config(model, key="model")) for model in models]
        rows = []
        for what, is_trained in (("training step", True), ("validation batch", False)):
            seconds, alone, products = [], [], []
            for _ in range(1 + options.rounds):
                begin = time.process_time()
                ours.step() if is_trained else ours.validate()
                seconds.append(time.process_time() - begin)
                products = step_products(sizes[0], sizes[1], ours.work[-1], is_trained=is_trained)
                alone.append(seconds_of(products))
            tflop = sum(product.flops for product in products) / 1e12
            rows.append(Row(loss, what, seconds[1:], alone[1:], tflop))
        peak = max(record["perf/peak_memory_gb"] for record in ours.records)
    return [replace(row, peak_gib=peak) for row in rows]


def grid(rows: list[Row]) -> Grid:
    cells = [
        [
            row.loss,
            row.what,
            f"{statistics.median(row.seconds):.1f}",
            f"{statistics.median(row.products):.1f}",
            f"{row.ratio:.2f}",
            f"{min(row.ratios):.2f}–{max(row.ratios):.2f}",
            f"{row.tflop:.2f}",
            f"{row.peak_gib:.1f}",
        ]
        for row in rows
    ]
    names = ["loss", "", "s", "products, s", "ratio", "range", "TFLOP", "peak, GiB"]
    return Grid("SmolLM2-135M ← Gemma-3-270M", names, cells)


NOTES = """\
**s**: CPU seconds of the process. **ratio**: seconds of the step over seconds of its products, the median over rounds;
**range** is the smallest and the largest. The products are those of the layers, of causal attention and of both heads,
each a wide product in fp32 of the shape that the step needs: three for each matrix of the student in a training step,
else one, and 256 rows at a time with a head. The rows of the teacher's head are the positions that the loss compares;
byte_prefix also reads those of further teacher tokens of a chunk. The ratio adds everything else: norms, softmaxes,
losses, the optimizer, data, and products that are thinner or repeated. **peak** is that of the process.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--place", type=Path, default=ROOT / "outputs" / "real_models", help="folder of the models")
    parser.add_argument("--loss", nargs="+", default=LOSSES)
    parser.add_argument("--texts", type=int, default=4, help="of a step, read at a time (default: %(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of a text (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="that count, after one that does not")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--set", nargs="+", default=[], dest="overrides", metavar="KEY=VALUE", help="of the run")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # a run sets its threads to it
    torch.set_num_threads(1)
    facts = {
        "hardware": hardware(),
        "packages": f"torch {torch.__version__}",
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": " ".join(["uv run benchmarks/large_vocabulary.py", *sys.argv[1:]]),
        "batch": f"{options.texts} × {options.length} tokens",
        "threads": "1",
        "rounds": f"{options.rounds}, after 1 that does not count",
    }
    rows: list[Row] = []
    for loss in options.loss:
        with tempfile.TemporaryDirectory() as scratch:
            texts = Path(scratch) / "texts.jsonl"
            write(texts, training_texts(documents(None), TEXT_BYTES))
            rows += measure(options, loss, texts, Path(scratch))
        write_results(options.output, rows, facts)
    Console(width=140).print(grid(rows).rich())


def write_results(folder: Path, rows: list[Row], facts: dict[str, str]) -> None:
    described = "\n".join(f"* {key}: {value}" for key, value in facts.items())
    text = f"# Steps with a vocabulary of 262,144 tokens\n\n{grid(rows).markdown()}\n{NOTES}\n{described}\n"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "large_vocabulary.md").write_text(text, encoding="utf-8")
    found = {"facts": facts, "rows": [asdict(row) | {"ratio": row.ratio} for row in rows]}
    (folder / "large_vocabulary.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
