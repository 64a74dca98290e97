"""What a loss holds and needs as its sequence grows: with chunks, only the gradient grows (methods.md §8.1)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from losses_cases import Loss
from losses_measure import Memory, memory
from losses_texts import logits
from rich.progress import track

from nemo_opd import losses
from nemo_opd.losses.divergence import DIVERGENCES
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import LossOutput

STATUS, RESET_PEAK = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass(frozen=True)
class Growth:
    """One loss at one length, in bytes."""

    name: str
    positions: int
    logits: int
    """Of the student's bf16 logits."""
    memory: Memory
    resident: int | None
    """The rise of the process's resident set over forward and backward, from the kernel; None where it does not say."""


def measure(
    lengths: Iterable[int], vocab: int, projection: ProjectionMatrix | None, device: torch.device
) -> list[Growth]:
    """Every divergence of same_vocab, then p_kl if there is a projection; bf16 logits of the sizes given."""
    found = []
    for positions in track(list(lengths), "large", transient=True):
        for name, loss, width, teacher_width in _losses(positions, vocab, projection, device):
            found.append(_growth(name, loss, positions, width, teacher_width, device))
    return found


def _losses(
    positions: int, vocab: int, projection: ProjectionMatrix | None, device: torch.device
) -> Iterable[tuple[str, Loss, int, int]]:
    mask = torch.ones(1, positions, dtype=torch.bool, device=device)
    for kind in DIVERGENCES:
        yield f"same_vocab, {kind}", _value(partial(losses.same_vocab, mask=mask, divergence=kind)), vocab, vocab
    if projection is not None:
        ids = torch.zeros(1, positions, dtype=torch.long, device=device)
        chunk_id = torch.arange(positions, dtype=torch.int32, device=device).unsqueeze(0)
        sizes = projection.student_vocab_size, projection.teacher_vocab_size
        of = partial(
            losses.p_kl,
            projection=projection,
            student_ids=ids,
            teacher_ids=ids,
            student_chunk_id=chunk_id,
            teacher_chunk_id=chunk_id,
        )
        for kind in DIVERGENCES:
            yield f"p_kl, {kind}", _value(partial(of, divergence=kind)), *sizes


def _growth(name: str, loss: Loss, positions: int, width: int, teacher_width: int, device: torch.device) -> Growth:
    student = logits(positions, width, 0, torch.bfloat16).to(device).requires_grad_()
    teacher = logits(positions, teacher_width, 1, torch.bfloat16).to(device)
    used = memory(lambda: loss(student, teacher), [student], [student, teacher])
    resident = None if device.type == "cuda" else _resident_rise(lambda: loss(student, teacher).backward())
    return Growth(name, positions, student.nbytes, used, resident)


def _resident_rise(call: Callable[[], object]) -> int | None:
    try:
        RESET_PEAK.write_text("5")
    except OSError:
        return None
    before = _status("VmRSS")
    call()
    return _status("VmHWM") - before


def _status(key: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(f"{key}:"))
    return 1024 * int(line.split()[1])


def _value(of: Callable[..., LossOutput]) -> Loss:
    return lambda student, teacher: of(student, teacher).loss
