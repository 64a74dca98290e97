"""Errors of kernels in Triton's interpreter against the PyTorch form in fp64."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from nemo_opd.kernels import launch
from nemo_opd.kernels.forms import CellMap, EntryLists
from nemo_opd.logits import head, rows
from nemo_opd.logits.head import Head, HeadLogits
from nemo_opd.logits.planned import PlannedLoss, compute_together
from nemo_opd.logits.rows import TrainableRows
from nemo_opd.losses import alm, cells, cross_entropy, p_kl, same_vocab, shared_prefix, strict
from nemo_opd.projection import ProjectionMatrix
from tests.kernels import interpreted_layers
from tests.kernels.moved import moved_bytes
from tests.losses.cases import KINDS, LOSSES, Case, identity, one_tokenizer

V, W, S = 90, 101, 5
"""Odd, and wider than a kernel's block."""
CELLS_LISTED = 4
"""Longest list of entries that counts as short."""


@dataclass(frozen=True)
class Comparison:
    error: float
    """Largest difference in loss and gradient, as a share of the largest number of each."""
    kernels: dict[str, int]
    """Number of launches, keyed by name."""
    is_finite: bool


@contextmanager
def small_blocks(launched: list[tuple[str, int]]) -> Iterator[None]:
    """Use kernels, each in several steps, and record their names and bytes."""
    run = launch.launch

    def noted(name: str, num_bytes: int, kernel: Callable[[], object]) -> None:
        launched.append((name, num_bytes))
        run(name, num_bytes, kernel)

    with ExitStack() as stack:
        tiles = {"SHORT_TILE": (16, 2), "LONG_TILE": (2, 4)}
        for name, value in {"BLOCK": 64, "ROWS_BLOCK": 32, "SHORT": CELLS_LISTED, "launch": noted, **tiles}.items():
            stack.enter_context(patch.object(launch, name, value))
        # Without the compiler: losses without a kernel are not tested here.
        stack.enter_context(patch("nemo_opd.losses.fused.is_compiled", lambda device: False))
        stack.enter_context(launch.compiling(True))
        yield


def compared(run: Callable[[torch.dtype], Sequence[Tensor]]) -> Comparison:
    """Compare loss and gradients by kernels in fp32 with plain PyTorch in fp64."""
    launched: list[tuple[str, int]] = []
    expected = run(torch.float64)
    with small_blocks(launched):
        actual = run(torch.float32)
    error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(actual, expected, strict=True))
    is_finite = all(bool(tensor.isfinite().all()) for tensor in expected)
    return Comparison(error, dict(Counter(name for name, _ in launched)), is_finite)


def projection(seed: int) -> ProjectionMatrix:
    """Return exact pairs, tokens with several partners, partners of many tokens, and tokens without a partner."""
    generator = np.random.default_rng(seed)
    indices, weights = np.full((V, 4), -1, np.int32), np.zeros((V, 4))
    partners, is_exact = generator.permutation(W), np.arange(V) % 3 == 1
    for token in range(V - 5):
        count = 1 if is_exact[token] else int(generator.integers(1, 5))
        columns = partners[token : token + 1] if is_exact[token] else generator.choice(W, count, replace=False)
        if token % 3 == 2:
            columns[0] = partners[V]
            count = len(columns := np.unique(columns))
        indices[token, :count], weights[token, :count] = columns, 1 / count
    is_exact[V - 5 :] = False
    student_cells, teacher_cells = generator.integers(-1, 12, V), generator.integers(-1, 14, W)
    maps = {"student_shared_prefix": student_cells, "teacher_shared_prefix": teacher_cells}
    return ProjectionMatrix(indices, weights, is_exact, teacher_vocab_size=W, **maps)


@dataclass(frozen=True)
class Text:
    """A sequence; some losses skip some of its positions."""

    student: Tensor
    same: Tensor
    cross: Tensor
    between: ProjectionMatrix
    weights: Tensor

    @staticmethod
    def random(seed: int, scale: float) -> "Text":
        generator = torch.Generator().manual_seed(seed)
        sides = (
            scale * torch.randn(1, S, width, generator=generator, dtype=torch.float64) for width in (V + 3, V, W + 2)
        )
        return Text(*sides, projection(seed), torch.tensor([0.5]))

    def to(self, dtype: torch.dtype) -> "Text":
        return replace(self, **{name: getattr(self, name).to(dtype) for name in ("student", "same", "cross")})

    def plans(self, student: Tensor | TrainableRows, kind: str, tau: float) -> dict[str, PlannedLoss]:
        ids = torch.arange(S).unsqueeze(0)
        chunks = torch.tensor([[-1, 0, 1, 1, -1]])
        mask = torch.ones(1, S, dtype=torch.bool)
        shared = {"temperature": tau, "divergence": kind, "beta": 0.3, "mixed_weight": 0.3}
        cross_tokenizer: dict[str, Any] = {
            "student_ids": ids,
            "teacher_ids": ids,
            "student_chunk_id": chunks,
            "teacher_chunk_id": chunks,
            "sequence_weights": self.weights,
        }
        projected = {**cross_tokenizer, **shared, "projection": self.between}
        same_tokenizer = {"student_vocab_size": V, "mask": mask & (ids != 3)}
        return {
            "cross_entropy": cross_entropy.plan(student, ids, mask=mask, vocab_size=V).times(0.7),
            "same_vocab": same_vocab.plan(student, self.same, **shared, **same_tokenizer),
            "p_kl": p_kl.plan(student, self.cross, **projected, coverage_coef=0.6),
            "strict": strict.plan(student, self.cross, **projected),
            "strict_rest": strict.plan(student, self.cross, **projected, normalization="rest", continuation_weight=0.5),
            "shared_prefix": shared_prefix.plan(student, self.cross, **projected),
            "alm": alm.plan(student, self.cross, **cross_tokenizer),
        }


def together(text: Text, names: Sequence[str], kind: str, tau: float = 1.7) -> Comparison:
    def run(dtype: torch.dtype) -> Sequence[Tensor]:
        typed = text.to(dtype)
        leaf = typed.student.requires_grad_()
        plans = typed.plans(leaf, kind, tau)
        loss = compute_together([plans[name] for name in names]).loss
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    return compared(run)


def from_a_head(dtype: torch.dtype, head_rows: int = V) -> Comparison:
    """Compare losses whose gradient is written once, in the head's dtype and in aligned rows, as on a GPU."""
    text = Text.random(5, 3.0)
    generator = torch.Generator().manual_seed(0)
    shapes = (1, S), (head_rows,)
    hidden, weight = (torch.randn(*shape, 16, generator=generator).to(dtype).double() for shape in shapes)

    def run(compute_dtype: torch.dtype) -> Sequence[Tensor]:
        leaf_dtype = dtype if compute_dtype == torch.float32 else compute_dtype
        leaves = [tensor.detach().to(leaf_dtype).requires_grad_() for tensor in (hidden, weight)]
        plans = text.to(compute_dtype).plans(HeadLogits(leaves[0], Head(leaves[1])), "jsd", 1.0)
        loss = compute_together([plans[name] for name in ("cross_entropy", "same_vocab", "p_kl")]).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def as_on_a_gpu(width: int, device: torch.device) -> int:
        return rows.row_distance(width, torch.device("cuda"))

    with patch.object(head, "row_distance", as_on_a_gpu):
        return compared(run)


def at_equal_sides(case: Case) -> Comparison:
    """Return the largest number of loss and gradient as `error`; both should be 0."""
    launched: list[tuple[str, int]] = []
    batch = replace(one_tokenizer(positions=4, width=20).to(torch.bfloat16), projection=identity(20, 14))
    with small_blocks(launched):
        tensors = case.value_and_gradient(batch.with_student_as_teacher(), temperature=0.7)
    return Comparison(
        max(float(tensor.abs().max()) for tensor in tensors), dict(Counter(name for name, _ in launched)), True
    )


def without_some_logits(text: Text, kind: str) -> Text:
    """Set logits to −∞ on both sides, and on one side if the divergence stays finite."""
    text.student[:, :, V - 1] = text.same[:, :, V - 1] = -torch.inf
    if kind not in ("forward_kl", "mixed"):
        text.student[:, 1:3, 10:40] = -torch.inf
        text.student[:, 1:3, 16:23] = 0
    if kind in ("jsd", "tvd", "forward_kl"):
        text.same[:, :, 50:60] = text.cross[:, :, 50:60] = -torch.inf
    return text


def losses_with_nan() -> dict[str, bool]:
    """Return whether a loss is NaN if one logit is, keyed by divergence and the logit's side."""
    results = {}
    for kind, _ in KINDS:
        for side in ("student", "same", "cross"):
            text = Text.random(6, 2.0).to(torch.float32)
            getattr(text, side)[:, 1, 7] = torch.nan
            with small_blocks([]):
                plans = text.plans(text.student.requires_grad_(), kind, 1.0)
                loss = compute_together([plans["p_kl" if side == "cross" else "same_vocab"]]).loss
            results[f"{kind}, {side}"] = bool(loss.isnan())
    return results


def bytes_of_rows() -> dict[str, Any]:
    """Return each kernel's declared bytes and the bytes that it reads and writes in the interpreter.

    These are vectors without cell maps; the bytes of the maps come last.
    """
    maps: list[tuple[int, int]] = []
    launched: list[tuple[str, int]] = []

    def remembered(*arguments: Any, **options: Any) -> CellMap:
        joint = cell_map(*arguments, **options)
        for part in (joint, joint.student_of_cell, joint.teacher_of_cell, joint.cells_of_student):
            maps.extend(_span(getattr(part, name)) for name in _tensors(part))
        return joint

    counted: list[tuple[str, int, int, int]] = []

    def run(name: str, num_bytes: int, kernel: Callable[[], object]) -> None:
        moved[0] = 0
        kernel()
        counted.append((name, num_bytes, moved[0], sum(last - first for first, last in maps)))

    cell_map = cells.cell_map
    text = Text.random(9, 3.0).to(torch.float32)
    with (
        small_blocks(launched),
        patch.object(launch, "launch", run),
        patch.object(cells, "cell_map", remembered),
        moved_bytes(maps) as moved,
    ):
        plans = text.plans(text.student.requires_grad_(), "jsd", 1.0)
        for names in (("cross_entropy", "same_vocab"), ("p_kl",), ("shared_prefix",)):
            compute_together([plans[name] for name in names])
    return {"kernels": counted}


def _tensors(holder: CellMap | EntryLists) -> list[str]:
    return [name for name in holder.__slots__ if isinstance(getattr(holder, name), Tensor)]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return the first and last address that kernels may read, with the storage after the tensor."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    names = ("cross_entropy", "same_vocab", "p_kl")
    results = {f"together-{kind}": together(Text.random(1, 3.0), names, kind) for kind, _ in KINDS}
    results["extreme"] = together(Text.random(2, 50.0), names, "jsd", 1.0)
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        results[f"infinite-{kind}"] = together(without_some_logits(Text.random(3, 2.0), kind), names, kind, 1.0)
    for case in LOSSES:
        if case.name in ("same_vocab", "strict-rest", "shared_prefix"):
            results[f"equal-{case.name}"] = at_equal_sides(case)
    # Two losses of one form, and losses without a kernel.
    results["mixture"] = together(Text.random(4, 3.0), ("p_kl", "shared_prefix", "alm", "strict_rest"), "mixed")
    results["two-forms"] = together(
        Text.random(4, 3.0), ("p_kl", "shared_prefix", "strict", "same_vocab"), "reverse_kl"
    )
    results["head-bf16"] = from_a_head(torch.bfloat16)
    results["wide-head-bf16"] = from_a_head(torch.bfloat16, V + 40)
    return {name: asdict(result) for name, result in results.items()} | {
        "bytes": bytes_of_rows(),
        "nan": losses_with_nan(),
        "layers": interpreted_layers.results(),
    }
