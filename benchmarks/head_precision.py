"""Logits of bf16 hidden states and heads: written in fp32, or rounded to bf16 and read in fp32; cost and error.

uv run benchmarks/head_precision.py            # writes benchmarks/results/head_precision.md and head_precision.json

The student is near the teacher: its hidden states are the teacher's with a hundredth of their size in noise. The true
values are those of the same bf16 numbers in fp64. On a GPU where there is one.
"""

import argparse
import json
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path

import torch
import torch.nn.functional as F
from alignment import Grid
from demo import ROOT, commit, hardware
from losses_measure import interleaved, median_ratio, memory
from rich.console import Console
from torch import Tensor

from nemo_opd.logits import Head, HeadLogits
from nemo_opd.losses import same_vocab

DIVERGENCES = ("forward_kl", "reverse_kl", "jsd")
MIB = 2**20


class RoundedLogits(HeadLogits):
    """As a linear layer in bf16 writes them."""

    def __init__(self, hidden: Tensor, head: Head) -> None:
        super().__init__(hidden, head)
        self.dtype = hidden.dtype

    @torch.no_grad()
    def read(self, rows: Tensor, width: int) -> Tensor:
        return F.linear(self.hidden.flatten(0, 1).index_select(0, rows), self.head.weight[:width])


@dataclass(frozen=True)
class Row:
    divergence: str
    fp32_ms: float
    rounded_ms: float
    ratio: float
    """The median over rounds of the one time over the other."""
    fp32_peak: int
    """Bytes."""
    rounded_peak: int
    true_loss: float
    fp32_loss: float
    rounded_loss: float
    fp32_cosine: float
    """Of the gradient of hidden states to the true one."""
    rounded_cosine: float


def measured(divergence: str, hidden: tuple[Tensor, Tensor], weight: Tensor, repeats: int) -> Row:
    student, teacher = hidden
    mask = torch.ones(student.shape[:2], device=student.device)
    leaves = [student.requires_grad_(), weight.requires_grad_()]

    def loss(of: type[HeadLogits]) -> Tensor:
        sides = of(student, Head(weight)), of(teacher, Head(weight.detach()))
        return same_vocab(*sides, mask=mask, divergence=divergence).loss

    steps = {of.__name__: (lambda of=of: loss(of)) for of in (HeadLogits, RoundedLogits)}
    times = interleaved(steps, leaves, repeats)
    peaks = {name: memory(step, leaves, [*leaves, teacher]).peak for name, step in steps.items()}
    losses, gradients = {}, {}
    for name, step in steps.items():
        value = step()
        losses[name], (gradients[name],) = value.item(), torch.autograd.grad(value, student)
    exact = student.detach().double().requires_grad_()
    head = Head(weight.detach().double())
    sides = HeadLogits(exact, head), HeadLogits(teacher.double(), head)
    true = same_vocab(*sides, mask=mask, divergence=divergence).loss
    (wanted,) = torch.autograd.grad(true, exact)
    cosine = {
        name: F.cosine_similarity(gradient.double().flatten(), wanted.flatten(), dim=0).item()
        for name, gradient in gradients.items()
    }
    own, other = HeadLogits.__name__, RoundedLogits.__name__
    return Row(
        divergence,
        times[own].median_ms,
        times[other].median_ms,
        median_ratio(times[own], times[other]),
        peaks[own],
        peaks[other],
        true.item(),
        losses[own],
        losses[other],
        cosine[own],
        cosine[other],
    )


def drawn(options: argparse.Namespace) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Hidden states [1, S, D] of student and teacher, whose largest logit is `peak`, and the head [V, D]."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(options.vocab, options.width, generator=generator) / options.width**0.5
    teacher = torch.randn(1, options.positions, options.width, generator=generator)
    teacher *= options.peak / (teacher @ weight.t()).abs().amax()
    student = teacher + 0.01 * teacher.std() * torch.randn(teacher.shape, generator=generator)
    student, teacher, weight = (each.to(options.device, torch.bfloat16) for each in (student, teacher, weight))
    return (student, teacher), weight


def grid(rows: list[Row]) -> Grid:
    cells = [
        [
            row.divergence,
            f"{row.fp32_ms:,.0f}",
            f"{row.rounded_ms:,.0f}",
            f"{row.ratio:.2f}",
            f"{row.fp32_peak / MIB:,.0f}",
            f"{row.rounded_peak / MIB:,.0f}",
            f"{row.fp32_loss / row.true_loss - 1:+.2%}",
            f"{row.rounded_loss / row.true_loss - 1:+.0%}",
            f"{row.fp32_cosine:.5f}",
            f"{row.rounded_cosine:.2f}",
        ]
        for row in rows
    ]
    names = ["ms", "rounded", "ratio", "peak, MiB", "rounded", "loss off by", "rounded", "gradient's cosine", "rounded"]
    return Grid("Logits in fp32, and rounded to bf16", ["divergence", *names], cells)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--positions", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=32_768)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--peak", type=float, default=20.0, help="largest logit")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--output", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    hidden, weight = drawn(options)
    rows = [measured(divergence, hidden, weight, options.repeats) for divergence in DIVERGENCES]
    name = hardware() if options.device == "cpu" else torch.cuda.get_device_name()
    facts = {
        "hardware": f"{name}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "commit": commit(),
        "date": date.today().isoformat(),
        "command": "uv run benchmarks/head_precision.py",
        "shapes": f"{options.positions:,} positions, {options.vocab:,} tokens, width {options.width:,}, "
        f"largest logit {options.peak:g}",
        "times": "forward and backward, the median of the rounds, which take turns",
    }
    table, described = grid(rows), "\n".join(f"* {key}: {value}" for key, value in facts.items())
    options.output.mkdir(parents=True, exist_ok=True)
    text = f"# Logits of bf16 hidden states\n\n{table.markdown()}\n{described}\n"
    (options.output / "head_precision.md").write_text(text, encoding="utf-8")
    found = {"facts": facts, "rows": [asdict(row) for row in rows]}
    (options.output / "head_precision.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    Console(width=140).print(table.rich())


if __name__ == "__main__":
    main()
