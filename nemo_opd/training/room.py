"""Disk space for what a run writes."""

from pathlib import Path

import torch

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.disk import require_room
from nemo_opd.errors import ConfigError
from nemo_opd.models.load import load_config
from nemo_opd.training.memory import ModelSize

TRAINED_BYTES = 12
"""Bytes of a trained number in a checkpoint: the fp32 weight and AdamW's two moments."""


def require_room_to_save(config: RunConfig, student: ModelSize, output_dir: Path) -> int:
    """Return the bytes of a checkpoint's tensors. Raises ConfigError where one and the trained model do not fit."""
    exported = _exported_bytes(config.student, student)
    checkpoint = TRAINED_BYTES * student.trained_parameters + exported
    require_room(
        output_dir,
        checkpoint + exported,
        "one checkpoint and the trained model",
        instead="choose another run.output_dir",
        kind=ConfigError,
    )
    return checkpoint


def _exported_bytes(student: Student, size: ModelSize) -> int:
    """Return the bytes of the folder in Hugging Face form."""
    if student.lora is not None and student.lora.export == "adapter":
        return size.trained_parameters * torch.float32.itemsize
    dtype = load_config(student.model, key="student.model").dtype
    return size.parameters * (dtype if isinstance(dtype, torch.dtype) else torch.float32).itemsize
