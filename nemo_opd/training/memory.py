"""What a rank will hold in memory, from the models' configurations alone."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher

MASTER_WEIGHT, GRADIENT, ADAM_MOMENTS = 4, 4, 8
"""Bytes per parameter of the student, in fp32."""
LOGITS_SIZED = 3
"""Tensors of that size at once: the logits, the gradient of one term, and the sum of those before."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes by part, on one rank. Activations, which depend on the model's code, are not in it."""

    parts: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class ModelSize:
    parameters: int
    vocab_size: int
    hidden_size: int


def model_size(config: PretrainedConfig) -> ModelSize:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    text = config.get_text_config()
    return ModelSize(parameters, text.vocab_size, text.hidden_size)


def estimate(
    config: RunConfig, student: ModelSize, teachers: Sequence[ModelSize], *, num_ranks: int, compute_bytes: int
) -> MemoryEstimate:
    """Parameters are sharded over ranks; a handed-over head and the gradients of logits are each rank's own.

    `compute_bytes`: of one number in the student's forward pass.
    """
    per_parameter = MASTER_WEIGHT + GRADIENT + ADAM_MOMENTS
    parts = {"student: weights, gradients, optimizer": student.parameters * per_parameter // num_ranks}
    positions = config.train.micro_batch_size * config.train.max_length
    logits = positions * student.vocab_size * compute_bytes
    parts["student: logits and their gradients"] = LOGITS_SIZED * logits
    rows = config.train.global_batch_size // num_ranks
    for settings, size in zip(config.active_teachers, teachers, strict=True):
        width = config.train.max_length
        if isinstance(settings, CrossTokenizerTeacher) and settings.max_length is not None:
            width = settings.max_length
        item_bytes: int = getattr(torch, settings.dtype).itemsize
        parts[f"{settings.name}: weights"] = size.parameters * item_bytes // num_ranks
        if config.handoff.type == "logits":
            parts[f"{settings.name}: logits handed over"] = rows * width * size.vocab_size * item_bytes
        else:
            parts[f"{settings.name}: hidden states handed over"] = rows * width * size.hidden_size * item_bytes
            parts[f"{settings.name}: head handed over"] = size.vocab_size * size.hidden_size * item_bytes
    return MemoryEstimate(parts)
