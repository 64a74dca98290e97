"""Kernels in Triton's interpreter: how far each is from its PyTorch form in fp64."""

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
"""Entries of a list that make it long."""


@dataclass(frozen=True)
class Found:
    error: float
    """Largest difference of loss and gradient, as a share of their largest numbers."""
    kernels: dict[str, int]
    """Launches, by name."""
    is_finite: bool


@contextmanager
def small_blocks(launched: list[tuple[str, int]]) -> Iterator[None]:
    """Use kernels, in several steps each, and note their names and bytes."""
    run = launch.launch

    def noted(name: str, num_bytes: int, of: Callable[[], object]) -> None:
        launched.append((name, num_bytes))
        run(name, num_bytes, of)

    with ExitStack() as stack:
        tiles = {"SHORT_TILE": (16, 2), "LONG_TILE": (2, 4)}
        for name, value in {"BLOCK": 64, "ROWS_BLOCK": 32, "SHORT": CELLS_LISTED, "launch": noted, **tiles}.items():
            stack.enter_context(patch.object(launch, name, value))
        # Without the compiler: what no kernel computes is not what is tested.
        stack.enter_context(patch("nemo_opd.losses.fused.is_compiled", lambda device: False))
        stack.enter_context(launch.compiling(True))
        yield


def compared(run: Callable[[torch.dtype], Sequence[Tensor]]) -> Found:
    """Compare loss and gradients in fp32, by kernels, with those in fp64."""
    launched: list[tuple[str, int]] = []
    expected = run(torch.float64)
    with small_blocks(launched):
        found = run(torch.float32)
    error = max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))
    is_finite = all(bool(each.isfinite().all()) for each in expected)
    return Found(error, dict(Counter(name for name, _ in launched)), is_finite)


def projection(seed: int) -> ProjectionMatrix:
    """Pairs, tokens of several others, others that many have, tokens without any."""
    generator = np.random.default_rng(seed)
    indices, weights = np.full((V, 4), -1, np.int32), np.zeros((V, 4))
    partners, is_exact = generator.permutation(W), np.arange(V) % 3 == 1
    for token in range(V - 5):
        number = 1 if is_exact[token] else int(generator.integers(1, 5))
        chosen = partners[token : token + 1] if is_exact[token] else generator.choice(W, number, replace=False)
        if token % 3 == 2:
            chosen[0] = partners[V]
            number = len(chosen := np.unique(chosen))
        indices[token, :number], weights[token, :number] = chosen, 1 / number
    is_exact[V - 5 :] = False
    cells, others = generator.integers(-1, 12, V), generator.integers(-1, 14, W)
    maps = {"student_shared_prefix": cells, "teacher_shared_prefix": others}
    return ProjectionMatrix(indices, weights, is_exact, teacher_vocab_size=W, **maps)


@dataclass(frozen=True)
class Text:
    """A sequence, not every position of which is compared by every loss."""

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
        across: dict[str, Any] = {
            "student_ids": ids,
            "teacher_ids": ids,
            "student_chunk_id": chunks,
            "teacher_chunk_id": chunks,
            "sequence_weights": self.weights,
        }
        onto = {**across, **shared, "projection": self.between}
        own = {"student_vocab_size": V, "mask": mask & (ids != 3)}
        return {
            "cross_entropy": cross_entropy.plan(student, ids, mask=mask, vocab_size=V).times(0.7),
            "same_vocab": same_vocab.plan(student, self.same, **shared, **own),
            "p_kl": p_kl.plan(student, self.cross, **onto, coverage_coef=0.6),
            "strict": strict.plan(student, self.cross, **onto),
            "strict_rest": strict.plan(student, self.cross, **onto, normalization="rest", continuation_weight=0.5),
            "shared_prefix": shared_prefix.plan(student, self.cross, **onto),
            "alm": alm.plan(student, self.cross, **across),
        }


def together(text: Text, names: Sequence[str], kind: str, tau: float = 1.7) -> Found:
    def run(dtype: torch.dtype) -> Sequence[Tensor]:
        of = text.to(dtype)
        leaf = of.student.requires_grad_()
        plans = of.plans(leaf, kind, tau)
        loss = compute_together([plans[name] for name in names]).loss
        return loss.detach(), *torch.autograd.grad(loss, leaf)

    return compared(run)


def from_a_head(dtype: torch.dtype, head_rows: int = V) -> Found:
    """The gradient is put once, in the type that the products with the head read, and in aligned rows as on a GPU."""
    text = Text.random(5, 3.0)
    generator = torch.Generator().manual_seed(0)
    shapes = (1, S), (head_rows,)
    hidden, weight = (torch.randn(*shape, 16, generator=generator).to(dtype).double() for shape in shapes)

    def run(of: torch.dtype) -> Sequence[Tensor]:
        leaves = [each.detach().to(dtype if of == torch.float32 else of).requires_grad_() for each in (hidden, weight)]
        plans = text.to(of).plans(HeadLogits(leaves[0], Head(leaves[1])), "jsd", 1.0)
        loss = compute_together([plans[name] for name in ("cross_entropy", "same_vocab", "p_kl")]).loss
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    def as_on_a_gpu(width: int, device: torch.device) -> int:
        return rows.row_distance(width, torch.device("cuda"))

    with patch.object(head, "row_distance", as_on_a_gpu):
        return compared(run)


def at_equal_sides(case: Case) -> Found:
    """`error`: the largest number of loss and gradient, which are 0."""
    launched: list[tuple[str, int]] = []
    batch = replace(one_tokenizer(positions=4, width=20).to(torch.bfloat16), projection=identity(20, 14))
    with small_blocks(launched):
        found = case.value_and_gradient(batch.with_student_as_teacher(), temperature=0.7)
    return Found(max(float(each.abs().max()) for each in found), dict(Counter(name for name, _ in launched)), True)


def without_some_logits(text: Text, kind: str) -> Text:
    """−∞ on both sides, and for the student alone where the divergence stays finite."""
    text.student[:, :, V - 1] = text.same[:, :, V - 1] = -torch.inf
    if kind not in ("forward_kl", "mixed"):
        text.student[:, 1:3, 10:40] = -torch.inf
        text.student[:, 1:3, 16:23] = 0
    if kind in ("jsd", "tvd", "forward_kl"):
        text.same[:, :, 50:60] = text.cross[:, :, 50:60] = -torch.inf
    return text


def of_nan() -> dict[str, bool]:
    """Whether a loss is NaN where one logit of a side is, by divergence and side."""
    found = {}
    for kind, _ in KINDS:
        for side in ("student", "same", "cross"):
            text = Text.random(6, 2.0).to(torch.float32)
            getattr(text, side)[:, 1, 7] = torch.nan
            with small_blocks([]):
                plans = text.plans(text.student.requires_grad_(), kind, 1.0)
                loss = compute_together([plans["p_kl" if side == "cross" else "same_vocab"]]).loss
            found[f"{kind}, {side}"] = bool(loss.isnan())
    return found


def bytes_of_rows() -> dict[str, Any]:
    """What each kernel reads and writes in the interpreter, vectors outside of maps, against what it says."""
    maps: list[tuple[int, int]] = []
    launched: list[tuple[str, int]] = []

    def remembered(*given: Any, **more: Any) -> CellMap:
        made = cell_map(*given, **more)
        for each in (made, made.student_of_cell, made.teacher_of_cell, made.cells_of_student):
            maps.extend(_span(getattr(each, name)) for name in _tensors(each))
        return made

    counted: list[tuple[str, int, int, int]] = []

    def run(name: str, num_bytes: int, of: Callable[[], object]) -> None:
        moved[0] = 0
        of()
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


def _tensors(of: CellMap | EntryLists) -> list[str]:
    return [name for name in of.__slots__ if isinstance(getattr(of, name), Tensor)]


def _span(tensor: Tensor) -> tuple[int, int]:
    """Return where it begins, and ends with what kernels may read behind it."""
    return tensor.data_ptr(), tensor.data_ptr() + tensor.untyped_storage().nbytes()


def main() -> dict[str, Any]:
    torch.set_num_threads(1)
    three = ("cross_entropy", "same_vocab", "p_kl")
    found = {f"together-{kind}": together(Text.random(1, 3.0), three, kind) for kind, _ in KINDS}
    found["extreme"] = together(Text.random(2, 50.0), three, "jsd", 1.0)
    for kind in ("forward_kl", "reverse_kl", "jsd"):
        found[f"infinite-{kind}"] = together(without_some_logits(Text.random(3, 2.0), kind), three, kind, 1.0)
    for case in LOSSES:
        if case.name in ("same_vocab", "strict-rest", "shared_prefix"):
            found[f"equal-{case.name}"] = at_equal_sides(case)
    # Two of one form, and others that no kernel has.
    found["mixture"] = together(Text.random(4, 3.0), ("p_kl", "shared_prefix", "alm", "strict_rest"), "mixed")
    found["two-forms"] = together(Text.random(4, 3.0), ("p_kl", "shared_prefix", "strict", "same_vocab"), "reverse_kl")
    found["head-bf16"] = from_a_head(torch.bfloat16)
    found["wide-head-bf16"] = from_a_head(torch.bfloat16, V + 40)
    return {name: asdict(each) for name, each in found.items()} | {
        "bytes": bytes_of_rows(),
        "nan": of_nan(),
        "layers": interpreted_layers.found(),
    }
