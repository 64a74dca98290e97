"""Inputs of the estimate in addition to the settings: models, layouts and the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction

import psutil
import torch

from nemo_opd.config.model import Student
from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import Teacher
from nemo_opd.distributed.layout import Layout
from nemo_opd.logits.blocks import block_bytes
from nemo_opd.models.fused_layers import may_fuse
from nemo_opd.models.load import compute_dtype
from nemo_opd.training.memory.formulas import FP32, Work
from nemo_opd.training.model_size import ModelSize, cut_numel, shard_numel


@dataclass(frozen=True, slots=True)
class Machine:
    """Device and memories of a rank."""

    device: str
    device_bytes: int | None
    """Memory of one GPU; None on CPU or if unknown."""
    host_bytes: int | None
    """Main memory of a node; None if unknown."""
    ranks_per_node: int
    """GPUs in use on a node; on CPU, the student's ranks on it."""

    @staticmethod
    def of_this_node(device: str, ranks_per_node: int, *, is_remote: bool) -> Machine:
        """Return this machine. is_remote: the run is on other machines, assumed to have this one's GPUs, if any."""
        sees_gpu = device == "cuda" and torch.cuda.is_available()
        # The free memory would be more exact, but reading it opens a CUDA context in the driver.
        device_bytes = torch.cuda.get_device_properties(0).total_memory if sees_gpu else None
        return Machine(device, device_bytes, None if is_remote else psutil.virtual_memory().total, ranks_per_node)

    @property
    def host_share(self) -> int | None:
        return None if self.host_bytes is None else self.host_bytes // self.ranks_per_node


@dataclass(frozen=True, slots=True)
class ModelSetup:
    """Model with its layout, and the amounts that a rank holds of it."""

    size: ModelSize
    vocab_size: int
    """Number of ids of its tokenizer; losses and buffers ignore further rows of the head."""
    layout: Layout
    stretch: Fraction = Fraction(1)
    """Tokens of its longest sequence divided by `train.max_length`."""
    longest_question: int = 0
    """Most tokens of a benchmark's question with its answer; 0 without benchmarks."""

    @property
    def shard(self) -> int:
        """Number of parameters in a rank's FSDP2 shard, without adapters."""
        return shard_numel(self.size.shapes, self.layout)

    @property
    def trained(self) -> int:
        """Number of trained parameters in a rank's FSDP2 shard."""
        return shard_numel(self.size.trained_shapes, self.layout)

    def student_bytes(self, itemsize: int) -> int:
        """Return the bytes of the student's weights on a rank: fp32, or with adapters frozen weights and fp32 adapters.

        itemsize: bytes per element of frozen weights.
        """
        return itemsize * self.shard + FP32 * self.trained if self.size.adapters else FP32 * self.shard

    @property
    def whole(self) -> int:
        """Number of parameters on a tensor-parallel rank when all are gathered, with adapters."""
        return cut_numel((*self.size.shapes, *self.size.adapters), self.layout.tp)

    @property
    def rest(self) -> int:
        """Number of gathered parameters outside the layers, which FSDP2 gathers together."""
        return cut_numel(self.size.rest, self.layout.tp)

    def is_sharded(self, model: Student | Teacher, itemsize: int) -> bool:
        """Return whether FSDP2 manages the parameters; on one rank, only if it casts the student's from fp32."""
        return self.layout.size > 1 or (isinstance(model, Student) and itemsize < FP32)

    def gathered(self, model: Student | Teacher, itemsize: int) -> tuple[int, int]:
        """Return the bytes of weights that stay gathered, and of the current layer and the prefetched one."""
        if not self.is_sharded(model, itemsize):
            return 0, 0
        if not model.parallelism.frees_gathered:
            return itemsize * self.whole, 0
        layers = max(cut_numel((*layer.shapes, *layer.adapters), self.layout.tp) for layer in self.size.layers)
        return itemsize * self.rest, 2 * itemsize * layers

    def columns(self, vocab_size: int) -> int:
        """Return the number of columns of the vocabulary on a tensor-parallel rank."""
        return -(-vocab_size // self.layout.tp)

    def work(self, model: Student | Teacher, rows: int, length: int, device: str) -> Work:
        """Return a rank's work on `rows` sequences of `length` positions, divided over context-parallel ranks."""
        dtype, layout = compute_dtype(model.dtype, device), self.layout
        return Work(
            rows * -(-length // layout.cp),
            length,
            dtype.itemsize,
            layout.tp,
            layout.tp if model.parallelism.sequence_parallel else 1,
            may_fuse(model.fused_layers, dtype, device) and not model.compile,
        )


@dataclass(frozen=True, slots=True)
class MemoryInputs:
    """Inputs of the estimate: models and machine of a run."""

    student: ModelSetup
    teachers: tuple[ModelSetup, ...]
    """One per active teacher."""
    machine: Machine
    arriving: int = 0
    """Bytes of teacher output from other nodes that a student rank keeps."""
    through_host: bool = False
    """Whether teacher output is handed over in main memory and copied to the student's device."""
    num_learned: int = 0
    """Elements of all learned projections, replicated on every student rank."""
    small_blocks: bool = False
    """Whether blocks of logits are as small as on a GPU with little memory."""

    def with_layouts(self, layouts: Mapping[int, Layout], config: RunConfig) -> MemoryInputs:
        """Return the situation with other layouts, keyed by 0 for the student and 1 + i for teacher i.

        A teacher with the student's weights has the student's layout.
        """
        student = replace(self.student, layout=layouts.get(0, self.student.layout))
        teachers = (
            replace(setup, layout=student.layout if settings.is_student else layouts.get(i, setup.layout))
            for i, (setup, settings) in enumerate(zip(self.teachers, config.active_teachers, strict=True), 1)
        )
        return replace(self, student=student, teachers=tuple(teachers))

    @property
    def device(self) -> str:
        return self.machine.device

    @property
    def block_bytes(self) -> int:
        """Byte budget for a block of the student's logits, and for a loss's temporaries."""
        return block_bytes(self.device, None if self.small_blocks else self.machine.device_bytes)
