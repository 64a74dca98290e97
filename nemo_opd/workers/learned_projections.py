"""Projections learned together with the student (methods.md §2.8)."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_opd.checkpoint.manager import INSTEAD
from nemo_opd.config.optim import Adafactor, AdamW, ClassOptimizer
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import OwnIdsTeacher
from nemo_opd.disk import storage_errors
from nemo_opd.errors import CheckpointError
from nemo_opd.files import write_synced
from nemo_opd.losses import LearnedProjection
from nemo_opd.models.folder import first_line
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import Last, Metric

_STATE = "projections.pt"
"""File of Δ and AdamW's moments in a checkpoint's state folder."""
EXPORTS = "projections"
"""Folder of the learned matrices in an exported model, with one file per teacher."""
_Projection = ProjectionMatrix | LearnedProjection


class LearnedProjections:
    """The learned projections' Δ, the same on all ranks, and their AdamW.

    Communicates one all-reduce per projection and step, of its gradient.
    """

    def __init__(self, config: RunConfig, projections: Sequence[ProjectionMatrix | None], device: str) -> None:
        """Start from the matrices. projections: one entry per active teacher."""
        teachers = config.active_teachers
        self.projections: list[_Projection | None] = list(projections)
        """One entry per active teacher; learned ones are replaced by their LearnedProjection."""
        self.by_teacher: dict[str, LearnedProjection] = {}
        """The learned projections, keyed by teacher name."""
        groups = []
        for i, (teacher, matrix) in enumerate(zip(teachers, projections, strict=True)):
            if isinstance(teacher, OwnIdsTeacher) and teacher.projection_lr is not None and matrix is not None:
                self.projections[i] = learned = LearnedProjection(matrix).to(device)
                self.by_teacher[teacher.name] = learned
                groups.append({"params": [learned.delta], "peak_lr": teacher.projection_lr})
        settings = config.student.optimizer
        moments = AdamW() if isinstance(settings, Adafactor | ClassOptimizer) else settings
        self._optimizer = (
            torch.optim.AdamW(groups, betas=moments.betas, eps=moments.eps, weight_decay=0.0) if groups else None
        )
        self._peak_lr = settings.lr

    def sum_gradients(self, divisor: float) -> list[Tensor]:
        """All-reduce the gradients, divided by the factor of the loss; return Σ |gradient| of each projection."""
        for delta in self._deltas():
            delta.grad = torch.zeros_like(delta) if delta.grad is None else delta.grad / divisor
            dist.all_reduce(delta.grad)
        return [delta.grad.abs().sum() for delta in self._deltas() if delta.grad is not None]

    def update(self, student_lr: float) -> None:
        """Take a step, with learning rates proportional to the student's current one."""
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = group["peak_lr"] * student_lr / self._peak_lr
            self._optimizer.step()

    def zero_grad(self) -> None:
        for delta in self._deltas():
            delta.grad = None

    def metrics(self) -> dict[str, Metric]:
        """Return the share of each projection's weight that has moved."""
        return {f"projection_moved/{name}": Last(learned.moved().mean()) for name, learned in self.by_teacher.items()}

    def save(self, folder: Path) -> None:
        """Write the state of all projections into a checkpoint's state folder, on rank 0. Raises CheckpointError."""
        if self._optimizer is None or dist.get_rank():
            return
        archive = io.BytesIO()
        deltas = {name: learned.state_dict() for name, learned in self.by_teacher.items()}
        torch.save({"deltas": deltas, "optimizer": self._optimizer.state_dict()}, archive)
        with storage_errors(folder, CheckpointError, needed=archive.tell(), instead=INSTEAD):
            write_synced(folder / _STATE, archive.getvalue())

    def load(self, folder: Path) -> None:
        """Restore the saved state; a run saved before its first step has none. Raises CheckpointError."""
        file = folder / _STATE
        if self._optimizer is None or not file.exists():
            return
        try:
            state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
            for name, learned in self.by_teacher.items():
                learned.load_state_dict(state["deltas"][name])
            self._optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # torch raises many types for a damaged file
            raise CheckpointError(
                f"{file} cannot be read ({first_line(error)}): it is damaged or belongs to other teachers; remove this "
                "checkpoint to use the previous one"
            ) from error

    def export(self, folder: Path) -> None:
        """Write the learned matrices into an exported model, on rank 0."""
        if self.by_teacher and dist.get_rank() == 0:
            (folder / EXPORTS).mkdir()
            for name, learned in self.by_teacher.items():
                learned.matrix().save(folder / EXPORTS / f"{name}.safetensors")

    def _deltas(self) -> Iterable[Tensor]:
        return (learned.delta for learned in self.by_teacher.values())
