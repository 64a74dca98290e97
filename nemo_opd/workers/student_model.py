"""The student's model and learned projections on one rank, and their export."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.checkpoint.manager import INSTEAD
from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import OwnIdsTeacher
from nemo_opd.config.train import Adafactor, AdamW, ClassOptimizer
from nemo_opd.errors import CheckpointError
from nemo_opd.files import require_uncompressed, settle, storage_errors, write_synced
from nemo_opd.handoff.shared_memory import FileDescriptor, HeldWeights
from nemo_opd.losses import LearnedProjection
from nemo_opd.models.export import save_adapted, save_pretrained, whole_state
from nemo_opd.models.folder import first_line
from nemo_opd.models.load import compute_dtype, stored_dtype, tokenizer_of
from nemo_opd.models.lora import Adapters
from nemo_opd.models.sharded_load import load_sharded
from nemo_opd.projection import ProjectionMatrix
from nemo_opd.types import Last, Metric
from nemo_opd.workers.out_of_memory import LOADING_STUDENT, needs_memory

_STATE = "projections.pt"
"""File of Δ and AdamW's moments in a checkpoint's state folder."""
PROJECTIONS = "projections"
"""Folder of the learned matrices in an exported model, with one file per teacher."""


def load_student(
    settings: Student, mesh: DeviceMesh, *, device: str, seed: int
) -> tuple[PreTrainedModel, Adapters | None]:
    """Load the model for training, sharded over `mesh`; also return the adapters that are trained instead, if any.

    seed: initializes adapters and PyTorch's generators, used for dropout. Raises ModelError and ClusterError.
    """
    compute = compute_dtype(settings.dtype, device)
    adapters = None if settings.lora is None else Adapters(settings.lora, settings.model, seed)
    with needs_memory(LOADING_STUDENT):
        model = load_sharded(
            settings,
            # Frozen weights need no more than the compute dtype.
            torch.float32 if adapters is None else compute,
            mesh,
            key="student.model",
            compute_dtype=compute,
            device="cpu" if settings.offload is True else device,
            trainable=True,
            adapters=adapters,
        )
    # Tensor-parallel ranks share a seed, since they must apply the same dropout mask.
    torch.manual_seed(seed + dist.get_rank() // settings.parallelism.tp)
    return model, adapters


class Exports:
    """Exporter of a model. All ranks call each method with the model on the device; only rank 0 writes and holds.

    Communicates an all-gather of the trained weights to rank 0.
    """

    def __init__(self, settings: Student, model: PreTrainedModel, adapters: Adapters | None) -> None:
        self._settings, self._model, self._adapters = settings, model, adapters
        self._weights: HeldWeights | None = None

    def write(self, folder: Path, served_as: str | None) -> None:
        """Write model and tokenizer in Hugging Face format, in the initial model's dtype.

        With adapters, `student.lora.export` selects the form. served_as: name of a dtype; the full model is then
        written in it, for a server. Raises StorageError, on rank 0 only, if the disk fails.
        """
        tokenizer = tokenizer_of(self._settings, key="student")
        dtype = (
            stored_dtype(self._settings.model, key="student.model") if served_as is None else getattr(torch, served_as)
        )
        needed = dtype.itemsize * sum(parameter.numel() for parameter in self._model.parameters())
        advice = "move the run's directory, and continue with run.resume=auto"
        with storage_errors(folder, needed=needed, instead=advice):
            if self._adapters is None:
                save_pretrained(self._model, tokenizer, folder, dtype)
            else:
                form = "merged" if served_as is not None else self._adapters.settings.export
                save_adapted(self._model, self._adapters, tokenizer, folder, dtype, form)
            # A server loads its folder right away, so it need not be flushed to disk.
            if served_as is None and dist.get_rank() == 0:
                settle(folder)

    def hold(self, served_as: str) -> FileDescriptor | None:
        """Keep a copy of the exported weights in rank 0's memory; return its file on rank 0, None on other ranks."""
        state = whole_state(self._model, self._adapters, getattr(torch, served_as))
        self._weights = HeldWeights(state) if dist.get_rank() == 0 else None
        return None if self._weights is None else self._weights.file

    def release(self) -> None:
        if self._weights is not None:
            self._weights.close()


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
            require_uncompressed(file)
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
            (folder / PROJECTIONS).mkdir()
            for name, learned in self.by_teacher.items():
                learned.matrix().save(folder / PROJECTIONS / f"{name}.safetensors")

    def _deltas(self) -> Iterable[Tensor]:
        return (learned.delta for learned in self.by_teacher.values())
