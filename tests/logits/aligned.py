"""Prints, as JSON, the differences of losses with aligned rows of logits from losses without, on the pretended GPU.

uv run python -m tests.logits.aligned
"""

import json
from dataclasses import asdict, dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_opd.distributed.transfer import to_device_batched
from nemo_opd.logits import Head, HeadLogits, rows
from tests.losses.cases import ALL_LOSSES, Batch, Case, random_logits
from tests.losses.counted import MOVED
from tests.pretend_gpu import DEVICE, counted

NUMBERS, HIDDEN = 64, 64
HEADS = {
    "as wide as the vocabulary, fp32": (0, torch.float32),
    "as wide as the vocabulary, bf16": (0, torch.bfloat16),
    "wider than aligned rows, bf16": (70, torch.bfloat16),
}
"""Rows of each head beyond the vocabulary, and its dtype."""
NAMES = {"same_vocab", "tcad", "sampled_kl-k2", "p_kl", "p_kl-mean", "gold", "strict", "byte_prefix", "alm", "uld"}


@dataclass(frozen=True)
class Difference:
    is_equal: bool
    """The loss and its gradients are equal bit for bit."""
    misaligned: list[tuple[int, ...]]
    """Strides of matrices in products whose rows do not begin at a multiple of NUMBERS."""
    misaligned_before: int
    """Number of such matrices without the alignment."""


class Strides(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.misaligned: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
            matrices = [matrix for matrix in (*args, result) if isinstance(matrix, Tensor) and matrix.dim() == 2]
            self.misaligned += [matrix.stride() for matrix in matrices if max(matrix.stride()) % NUMBERS]
        return result


def drawn(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    """Return multiples of 1/8: sums of their products are exact in any order."""
    return (random_logits(*shape, seed, 1.0) * 8).round().div(8).to(dtype).to(DEVICE).requires_grad_()


def value_and_gradients(case: Case, batch: Batch, extra_rows: int, dtype: torch.dtype) -> list[Tensor]:
    sizes = batch.student.shape[2], batch.teacher.shape[2]
    student, teacher = (
        HeadLogits(
            drawn(*side.shape[:2], HIDDEN, seed=i, dtype=dtype),
            Head(drawn(1, size + extra_rows, HIDDEN, seed=2 + i, dtype=dtype).detach()[0].requires_grad_()),
        )
        for i, (side, size) in enumerate(zip((batch.student, batch.teacher), sizes, strict=True))
    )
    on_device = replace(batch, student=student, teacher=teacher)
    loss = case.run(on_device, student_vocab_size=sizes[0], teacher_vocab_size=sizes[1], chunk_size=3).loss
    return [loss, *torch.autograd.grad(loss, student.leaves)]


def difference(case: Case, extra_rows: int, dtype: torch.dtype) -> Difference:
    with counted():
        batch = case.batch(0, torch.float32)
        sent = dict(zip(MOVED, to_device_batched([getattr(batch, name) for name in MOVED], DEVICE), strict=True))
        with Strides() as strides:
            aligned = value_and_gradients(case, replace(batch, **sent), extra_rows, dtype)
        with patch.object(rows, "ALIGNMENT", 1), Strides() as plain_strides:
            plain = value_and_gradients(case, replace(batch, **sent), extra_rows, dtype)
        is_equal = all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(aligned, plain, strict=True))
    return Difference(is_equal, strides.misaligned, len(plain_strides.misaligned))


if __name__ == "__main__":
    torch.set_num_threads(1)
    pairs = [(case, head) for case in ALL_LOSSES if case.name in NAMES for head in HEADS]
    print(json.dumps({f"{case}, head {head}": asdict(difference(case, *HEADS[head])) for case, head in pairs}))
