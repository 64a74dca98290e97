"""Run every loss on the pretended GPU; print kernels, waits, copies and the difference from the CPU as JSON.

uv run python -m tests.losses.counted
"""

import json
from dataclasses import asdict, dataclass, replace

import torch

from nemo_opd.distributed.transfer import to_device_batched
from tests.losses.cases import ALL_LOSSES, Case
from tests.pretend_gpu import DEVICE, counted

MOVED = ("student_ids", "teacher_ids", "student_chunk_id", "teacher_chunk_id")


@dataclass(frozen=True)
class Measured:
    kernels: int
    bytes: int
    waits: dict[str, int]
    copies: dict[str, int]
    error: float
    """Largest difference from the CPU's loss and gradient, relative to their largest entry."""


def measure(case: Case) -> Measured:
    """Count forward and backward in the second call, after caches are filled."""
    batch = case.batch(0, torch.float32)
    expected = case.value_and_gradient(batch)
    with counted() as work:
        sent = dict(zip(MOVED, to_device_batched([getattr(batch, name) for name in MOVED], DEVICE), strict=True))
        on_device = replace(batch, student=batch.student.to(DEVICE), teacher=batch.teacher.to(DEVICE), **sent)
        case.value_and_gradient(on_device)
        work.clear()
        result = case.value_and_gradient(on_device)
        counts = work.taken()
        pairs = [(ours.cpu(), theirs) for ours, theirs in zip(result, expected, strict=True)]
    error = max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)
    return Measured(**counts, error=error)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({case.name: asdict(measure(case)) for case in ALL_LOSSES}))
