"""The projections that are learned with the student (methods.md §2.8)."""

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
"""File of Δ and AdamW's moments in the state of a checkpoint."""
EXPORTS = "projections"
"""Folder of the learned matrices in an exported model, a file for each teacher."""
_Projection = ProjectionMatrix | LearnedProjection


class LearnedProjections:
    """Δ of each projection that is learned, the same on all ranks, and AdamW over them.

    Communicates one all-reduce of a projection's gradient a step.
    """

    def __init__(self, config: RunConfig, projections: Sequence[ProjectionMatrix | None], device: str) -> None:
        """Begin with the matrices. projections: of the active teachers."""
        teachers = config.active_teachers
        self.projections: list[_Projection | None] = list(projections)
        """As given, those that are learned in their learned form."""
        self.by_teacher: dict[str, LearnedProjection] = {}
        """Those that are learned, by the name of the teacher."""
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
        """Sum the gradients over all ranks, divided by the factor of the loss; return the sum of magnitudes of each."""
        for delta in self._deltas():
            delta.grad = torch.zeros_like(delta) if delta.grad is None else delta.grad / divisor
            dist.all_reduce(delta.grad)
        return [delta.grad.abs().sum() for delta in self._deltas() if delta.grad is not None]

    def update(self, student_lr: float) -> None:
        """Take a step, with learning rates that follow the student's."""
        if self._optimizer is not None:
            for group in self._optimizer.param_groups:
                group["lr"] = group["peak_lr"] * student_lr / self._peak_lr
            self._optimizer.step()

    def zero_grad(self) -> None:
        for delta in self._deltas():
            delta.grad = None

    def metrics(self) -> dict[str, Metric]:
        """Return the share of each projection's learned weight that has moved."""
        return {f"projection_moved/{name}": Last(each.moved().mean()) for name, each in self.by_teacher.items()}

    def save(self, folder: Path) -> None:
        """Write the state of all projections into a checkpoint's state, on rank 0. Raises CheckpointError."""
        if self._optimizer is None or dist.get_rank():
            return
        archive = io.BytesIO()
        deltas = {name: each.state_dict() for name, each in self.by_teacher.items()}
        torch.save({"deltas": deltas, "optimizer": self._optimizer.state_dict()}, archive)
        with storage_errors(folder, CheckpointError, needed=archive.tell(), instead=INSTEAD):
            write_synced(folder / _STATE, archive.getvalue())

    def load(self, folder: Path) -> None:
        """Read what `save` wrote; a state without it is that of a run before its first step. Raises CheckpointError."""
        file = folder / _STATE
        if self._optimizer is None or not file.exists():
            return
        try:
            state: dict[str, Any] = torch.load(file, weights_only=True, map_location="cpu")
            for name, each in self.by_teacher.items():
                each.load_state_dict(state["deltas"][name])
            self._optimizer.load_state_dict(state["optimizer"])
        except Exception as error:  # whatever torch makes of what is no state
            raise CheckpointError(
                f"{file} cannot be read ({first_line(error)}): it is damaged, or of other teachers; remove this "
                "checkpoint to use the one before"
            ) from error

    def export(self, folder: Path) -> None:
        """Write each learned matrix into an exported model, on rank 0."""
        if self.by_teacher and dist.get_rank() == 0:
            (folder / EXPORTS).mkdir()
            for name, each in self.by_teacher.items():
                each.matrix().save(folder / EXPORTS / f"{name}.safetensors")

    def _deltas(self) -> Iterable[Tensor]:
        return (each.delta for each in self.by_teacher.values())
