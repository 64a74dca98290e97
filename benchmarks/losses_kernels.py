"""The kernels of losses at real vocabularies: against formulas in fp64, and the milliseconds of each.

uv run benchmarks/losses_kernels.py check           # also with more than 2³¹ numbers, unless --small
uv run benchmarks/losses_kernels.py time            # needs a GPU: columns by id and by student, blocks, warps, tiles
TRITON_INTERPRET=1 uv run benchmarks/losses_kernels.py check     # without a GPU, in Triton's interpreter, small

Cross-entropy, same_vocab and p_kl of the same rows, as a step computes them together. With NEMO_OPD_TOKENIZERS also the
projections of real tokenizers. Prints a line of JSON after each case; exit status 1 if one fails.
"""

import argparse
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from nemo_opd.kernels import launch  # noqa: E402
from nemo_opd.kernels.forms import FORWARD_KL, JSD, CellComparison, Comparison, Measure, NegLogProb  # noqa: E402
from nemo_opd.kernels.joint import Placed, add_losses  # noqa: E402
from nemo_opd.losses.cells import covered_columns  # noqa: E402
from nemo_opd.models.load import load_tokenizer  # noqa: E402
from nemo_opd.projection import ProjectionMatrix, cached_projection  # noqa: E402
from nemo_opd.projection.matrix import order_by_student, with_columns  # noqa: E402
from tests.losses.real_sizes import projection as made_up  # noqa: E402

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
DIVISOR = 1 if HAS_GPU else 200
"""Of vocabularies in Triton's interpreter."""
COVERAGE = 1.0
ROWS, TIMED_ROWS = 64, 1743
"""Rows of a case; rows of logits that are computed at a time on a GPU of 80 GB."""
LARGEST = -(-(2**31 + 2**27) // 128_256) if HAS_GPU else 64
"""Rows with which an offset of 32 bits overflows."""
LOSS_ERROR = 2e-4
GRADIENT_ERRORS = {torch.float32: 1e-4, torch.bfloat16: 1e-2}
"""Largest error, of a loss relative to it, of a row's gradient relative to its norm."""
SHAPES: tuple[dict[str, Any], ...] = (
    {"BLOCK": launch.BLOCK, "ROWS_BLOCK": launch.ROWS_BLOCK, "WARPS": launch.WARPS},
    {"ROWS_BLOCK": 256, "WARPS": 4},
    {"BLOCK": 2048, "ROWS_BLOCK": 1024, "WARPS": 16},
    {"SHORT_TILE": (64, 8)},
    {"LONG_TILE": (4, 64)},
    {"LONG_TILE": (16, 64)},
)
"""Constants of `launch` that are timed, first the defaults; those that are not named have their defaults."""
REPEATS = 8
ALIGNED = 64
"""Numbers that rows are apart, or a multiple, so that each begins at 128 bytes at least."""


@dataclass(frozen=True)
class Pair:
    """Two vocabularies and the projection between them."""

    name: str
    projection: ProjectionMatrix
    student_size: int
    teacher_size: int

    def by_student(self) -> "Pair":
        """With the teacher's columns in the order of handoff.column_order=student."""
        order = order_by_student(self.projection, self.teacher_size)
        return replace(self, projection=with_columns(self.projection, order))


def pairs() -> Iterator[Pair]:
    sizes = 128_256 // DIVISOR, 200_019 // DIVISOR
    yield Pair("128,256 ← 200,019, made up", made_up(*sizes), *sizes)
    if HAS_GPU and "NEMO_OPD_TOKENIZERS" in os.environ:
        folder = Path(os.environ["NEMO_OPD_TOKENIZERS"])
        for names in (("llama3_1", "qwen3"), ("qwen3", "llama3_1")):
            tokenizers = [load_tokenizer(str(folder / name), key="NEMO_OPD_TOKENIZERS") for name in names]
            matrix = cached_projection(*tokenizers)[0]
            yield Pair(" ← ".join(names), matrix, matrix.student_vocab_size, matrix.teacher_vocab_size)


def placed(pair: Pair, rows: int, same: Tensor, cross: Tensor, kind: int) -> list[Placed]:
    """Cross-entropy and same_vocab of every row, p_kl of three of four."""
    generator = torch.Generator(DEVICE).manual_seed(1)
    targets = torch.randint(pair.student_size, (rows,), device=DEVICE, generator=generator)
    factors = torch.rand(rows, device=DEVICE, generator=generator) / rows
    places = torch.arange(rows, device=DEVICE)
    places = places[places % 4 != 3]
    measure = Measure(kind, 0.5)
    columns = covered_columns(pair.projection, pair.student_size, pair.teacher_size, DEVICE)
    mapped = CellComparison(cross, 1.0, measure, columns, COVERAGE)
    return [
        Placed(NegLogProb(targets), slice(0, rows), factors, pair.student_size),
        Placed(Comparison(same, 1.0, measure), slice(0, rows), factors.flip(0), pair.student_size),
        Placed(mapped, places, factors[: len(places)], pair.student_size),
    ]


def divergence(log_q: Tensor, log_p: Tensor, kind: int) -> Tensor:
    if kind == FORWARD_KL:
        return torch.where(log_q > -torch.inf, log_q.exp() * (log_q - log_p), 0.0).sum(-1)
    log_m = torch.logaddexp(log_q, log_p) - np.log(2)
    return 0.5 * (divergence(log_q, log_m, FORWARD_KL) + divergence(log_p, log_m, FORWARD_KL))


def expected(pair: Pair, student: Tensor, terms: list[Placed], row: int) -> tuple[list[float], Tensor]:
    """Losses and gradient of one row in fp64 by the formulas, with autograd."""
    leaf = student[row].double().requires_grad_()
    surprise, same, mapped = terms
    kind = same.form.measure.kind
    log_p = leaf.log_softmax(-1)
    log_q = same.form.teacher[row].double().log_softmax(-1)
    losses = [-log_p[surprise.form.targets[row]], divergence(log_q, log_p, kind)]
    factors = [surprise.factors[row], same.factors[row]]
    unit = (mapped.places == row).nonzero().flatten()
    if len(unit):
        losses.append(projected(pair.projection, leaf, mapped.form.teacher[unit[0]].double(), kind))
        factors.append(mapped.factors[unit[0]])
    total = sum(loss * factor.double() for loss, factor in zip(losses, factors, strict=True))
    (gradient,) = torch.autograd.grad(total, leaf)
    return [float(loss.detach()) for loss in losses], gradient


def projected(matrix: ProjectionMatrix, leaf: Tensor, teacher: Tensor, kind: int) -> Tensor:
    """p_kl of one row: the student's probabilities through the projection, compared on the columns that it covers."""
    token, slot = np.nonzero((matrix.indices >= 0) & (matrix.weights > 0))
    is_inside = (token < len(leaf)) & (matrix.indices[token, slot] < len(teacher))
    token, slot = token[is_inside], slot[is_inside]
    columns, cell = np.unique(matrix.indices[token, slot], return_inverse=True)
    weight = torch.from_numpy(matrix.weights[token, slot].astype(np.float64)).to(DEVICE)
    mass = leaf.softmax(-1)[torch.from_numpy(token).to(DEVICE)] * weight
    covered = mass.new_zeros(len(columns)).index_add(0, torch.from_numpy(cell).to(DEVICE), mass)
    log_covered = torch.where(covered > 0, covered, 1.0).log() - covered.sum().log()
    log_q = teacher[torch.from_numpy(columns.astype(np.int64)).to(DEVICE)].log_softmax(-1)
    return divergence(log_q, log_covered, kind) - COVERAGE * covered.sum().log()


def errors(pair: Pair, rows: int, dtype: torch.dtype, kind: int) -> dict[str, float]:
    """Largest errors of losses and gradients over some rows at both ends."""
    torch.manual_seed(0)
    student = torch.randn(rows, pair.student_size, device=DEVICE).mul_(3)
    same = torch.randn(rows, pair.student_size, device=DEVICE, dtype=dtype).mul_(3)
    cross = torch.randn(rows - rows // 4, pair.teacher_size, device=DEVICE, dtype=dtype).mul_(3)
    total = torch.full_like(student, torch.nan, dtype=dtype)  # every number must be written
    terms = placed(pair, rows, same, cross, kind)
    losses = add_losses(student, terms, total, is_first=True)
    if HAS_GPU:
        torch.cuda.synchronize()
    of_losses, of_gradients = [0.0], [0.0]
    for row in sorted({0, 1, 2, 3, rows // 2, rows - 5, rows - 2, rows - 1}):
        wanted, gradient = expected(pair, student, terms, row)
        units = [row, row, *(terms[2].places == row).nonzero().flatten().tolist()]
        values = [float(losses[i][unit]) for i, unit in enumerate(units)]
        of_losses += [abs(a - b) / max(abs(b), 1e-2) for a, b in zip(values, wanted, strict=True)]
        of_gradients.append(float((total[row].double() - gradient).norm() / gradient.norm()))
    return {
        "loss": max(of_losses),
        "gradient": max(of_gradients),
        "numbers": total.numel(),
        "NaN": int(total.isnan().sum()),
    }


def check(*, is_small: bool) -> bool:
    is_good = True
    for pair in pairs():
        cases = [(ROWS, torch.float32, FORWARD_KL), (ROWS, torch.bfloat16, JSD)]
        if pair.student_size == 128_256 // DIVISOR and not is_small:
            cases.append((LARGEST, torch.bfloat16, FORWARD_KL))
        for rows, dtype, kind in cases:
            divergence_name = "JSD" if kind == JSD else "forward KL"
            case = {"pair": pair.name, "rows": rows, "dtype": str(dtype), "divergence": divergence_name}
            try:
                found = errors(pair, rows, dtype, kind)
            except Exception as error:
                traceback.print_exc()
                print(json.dumps(case | {"error": f"{type(error).__name__}: {error}"[:300]}), flush=True)
                if "CUDA error" in str(error):
                    return False  # nothing works in this process any more
                is_good = False
                continue
            passed = found["loss"] < LOSS_ERROR and found["gradient"] < GRADIENT_ERRORS[dtype] and not found["NaN"]
            is_good &= passed
            print(json.dumps(case | found | {"passed": passed}, ensure_ascii=False), flush=True)
            gc.collect()
            torch.cuda.empty_cache()
    return is_good


def milliseconds(run: Callable[[], object]) -> dict[str, float]:
    """Time on the device of each kernel, by PyTorch's profiler."""
    from torch.profiler import ProfilerActivity, profile

    run()
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        for _ in range(REPEATS):
            run()
        torch.cuda.synchronize()
    by_kernel = {event.key[:60]: event.self_device_time_total / 1e3 / REPEATS for event in profiled.key_averages()}
    return dict(sorted(by_kernel.items(), key=lambda pair: -pair[1]))


def time_kernels() -> None:
    for pair in pairs():
        by_order = {"teacher": pair, "student": pair.by_student()}
        cases = [("teacher", False, SHAPES[0]), ("teacher", True, SHAPES[0])]
        cases += [("student", True, shape) for shape in SHAPES]
        for order, is_aligned, shape in cases:
            with patch.multiple(launch, **shape):
                by_kernel = timed(by_order[order], is_aligned)
            case = {"pair": pair.name, "column_order": order, "aligned": is_aligned, "shape": shape}
            case |= {"ms": {name: round(value, 3) for name, value in by_kernel.items()}}
            print(json.dumps(case | {"all, ms": round(sum(by_kernel.values()), 3)}, ensure_ascii=False), flush=True)
            torch.cuda.empty_cache()


def timed(pair: Pair, is_aligned: bool) -> dict[str, float]:
    torch.manual_seed(0)

    def draw(rows: int, width: int, dtype: torch.dtype = torch.float32) -> Tensor:
        stride = -(-width // ALIGNED) * ALIGNED if is_aligned else width
        return torch.randn(rows, stride, device=DEVICE, dtype=dtype)[:, :width]

    student, same = draw(TIMED_ROWS, pair.student_size), draw(TIMED_ROWS, pair.student_size)
    cross = draw(TIMED_ROWS - TIMED_ROWS // 4, pair.teacher_size)
    total = draw(TIMED_ROWS, pair.student_size, torch.bfloat16)
    terms = placed(pair, TIMED_ROWS, same, cross, FORWARD_KL)
    return milliseconds(lambda: add_losses(student, terms, total, is_first=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("check", "time"))
    parser.add_argument("--small", action="store_true", help="no case beyond 2³¹ numbers")
    options = parser.parse_args()
    warnings.filterwarnings("error", message=".*could not be (used|compiled)")  # else PyTorch computes, and all is well
    if options.what == "check":
        return int(not check(is_small=options.small))
    time_kernels()
    return 0


if __name__ == "__main__":
    sys.exit(main())
