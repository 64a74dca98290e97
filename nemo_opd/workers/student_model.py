"""The student's model on one rank."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from nemo_opd.config.model import Student
from nemo_opd.models.head import ReadingModel, reading_model
from nemo_opd.models.load import compute_dtype
from nemo_opd.models.lora import Adapters
from nemo_opd.models.sharded_load import load_sharded
from nemo_opd.workers.memory import LOADING_STUDENT, needs_memory


@dataclass(frozen=True, slots=True)
class StudentModel:
    model: PreTrainedModel
    adapters: Adapters | None
    """Adapters that are trained instead of the model's weights, or None to train the weights."""
    logit_rows: ReadingModel
    """Map from ids [B, S] to this rank's part of their logits; `whole` completes them for the losses."""


def load_student(
    settings: Student, mesh: DeviceMesh, *, device: str, handoff: Literal["hidden_states", "logits"], seed: int
) -> StudentModel:
    """Load the model for training, sharded over `mesh`. Raises ModelError and ClusterError.

    handoff: form of the teachers' output. seed: initializes adapters and PyTorch's generators, used for dropout.
    """
    compute, key = compute_dtype(settings.dtype, device), "student.model"
    adapters = None if settings.lora is None else Adapters(settings.lora, settings.model, seed)
    with needs_memory(LOADING_STUDENT):
        model = load_sharded(
            settings.model,
            # Frozen weights need no more than the compute dtype.
            torch.float32 if adapters is None else compute,
            mesh,
            key=key,
            parallelism=settings.parallelism,
            compute_dtype=compute,
            device="cpu" if settings.offload is True else device,
            trainable=True,
            activation_checkpointing=settings.activation_checkpointing,
            compile_layers=settings.compile,
            fused_layers=settings.fused_layers,
            adapters=adapters,
            attn_implementation=settings.attn_implementation,
        )
    # Tensor-parallel ranks share a seed, since they must apply the same dropout mask.
    torch.manual_seed(seed + dist.get_rank() // settings.parallelism.tp)
    return StudentModel(
        model, adapters, reading_model(model, handoff, key=key, mesh=mesh, parallelism=settings.parallelism)
    )
