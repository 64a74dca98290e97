"""What a teacher's process holds."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

import torch

from nemo_opd.config.run import RunConfig
from nemo_opd.config.teacher import CrossTokenizerTeacher, Teacher
from nemo_opd.logits.blocks import BLOCK_BYTES, CPU_BLOCK_BYTES
from nemo_opd.training.memory.activations import Work, forward_temporaries
from nemo_opd.training.memory.estimate import Part, Phase, during
from nemo_opd.training.memory.process import OTHERS_PHASES, ModelSetup, Process, after_reading, largest
from nemo_opd.training.memory.size import shard_numel


@dataclass(frozen=True, slots=True)
class TeacherJob:
    """What a teacher has to do on one rank."""

    config: RunConfig
    settings: Teacher
    setup: ModelSetup
    device: str
    transport: str
    buffers: int
    """Batches whose output it holds: the one being learned from and, where it works ahead, the next."""
    answers: bool = False
    """Questions, in the phase of that name; else it waits there."""

    @property
    def works_in(self) -> tuple[Phase, ...]:
        return (Phase.ANSWERS, Phase.TEACHERS) if self.answers else (Phase.TEACHERS,)

    @property
    def waits_in(self) -> tuple[Phase, ...]:
        return OTHERS_PHASES if self.answers else (Phase.ANSWERS, *OTHERS_PHASES)

    @property
    def item_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.settings.dtype)
        return dtype.itemsize

    @property
    def width(self) -> int:
        """Positions of a sequence of a batch."""
        stretch = self.setup.stretch
        return self.asked_width if stretch is None else ceil(stretch * self.config.train.max_length)

    @property
    def asked_width(self) -> int:
        """Positions of a question with its answer."""
        own = self.settings.max_length if isinstance(self.settings, CrossTokenizerTeacher) else None
        return own or self.config.train.max_length

    @property
    def rows(self) -> int:
        """Sequences of a batch."""
        return -(-self.config.train.global_batch_size // self.setup.layout.dp)

    @property
    def work(self) -> Work:
        layout, rows = self.setup.layout, min(self.rows, self.config.train.micro_batch_size)
        return Work(rows, self.width, layout.cp, layout.tp, self.setup.sequence_parallel, self.item_bytes)

    @property
    def columns(self) -> int:
        """Of its tokenizer's ids, those of this rank."""
        return -(-self.setup.vocab_size // self.setup.layout.tp)


def teacher_process(job: TeacherJob) -> Process:
    name, offload = job.settings.name, job.settings.offload is True
    shard = job.item_bytes * shard_numel(job.setup.size.shapes, job.setup.layout)
    here = job.works_in if offload else (*job.works_in, *job.waits_in)
    handed = handed_over(job)
    on_device = job.device == "cpu" or job.transport == "cuda_ipc"
    parts = (
        Part(name, "parameters", during(shard, Phase.LOADING, *here)),
        *forward_parts(job, offload),
        *(handed if on_device else ()),
    )
    read = Part(
        name,
        "largest tensor, read from the file",
        during(job.item_bytes * largest(job.setup.size.shapes), Phase.LOADING),
    )
    away = (Part(name, "parameters", during(shard, *job.waits_in)),) if offload else ()
    return Process(parts, (read, *away, *(() if on_device else handed)), (Phase.TEACHERS,), is_offloaded=offload)


def forward_parts(job: TeacherJob, offload: bool) -> list[Part]:
    """Of the two high points of a forward pass the higher: in a layer, or where logits are made.

    FSDP2 leaves embedding and head gathered after it, until the model moves.
    """
    setup, name, t = job.setup, job.settings.name, job.item_bytes
    rest = t * setup.rest
    in_layer = {
        "gathered parameters": rest + t * setup.gathered_layers,
        "activations": forward_temporaries(setup.size, job.work),
    }
    at_head = {"gathered parameters": rest, "activations": logits_bytes(job)}
    highest = max(in_layer, at_head, key=lambda parts: sum(parts.values()))
    left = {"gathered parameters": 0 if offload else rest, "activations": 0}
    waiting = [phase for phase in after_reading(job.config) if phase in job.waits_in]
    return [
        Part(name, part, during(left[part], *waiting) | {Phase.TEACHERS: num_bytes})
        for part, num_bytes in highest.items()
    ]


def logits_bytes(job: TeacherJob) -> int:
    """Hidden states, and logits of a microbatch where they are handed over; a cap makes two more of them.

    Where the aggregation asks for scores they are formed from logits, a chunk at a time.
    """
    size, t = job.setup.size, job.item_bytes
    num_bytes = job.work.tokens * size.hidden_size * t
    if job.config.handoff.type == "logits":
        columns = -(-size.vocab_size // job.setup.layout.tp)
        num_bytes += job.work.tokens * columns * t * (3 if size.has_soft_cap else 1)
    if job.config.aggregation.score is not None:
        num_bytes += BLOCK_BYTES if job.device == "cuda" else CPU_BLOCK_BYTES
    return num_bytes


def handed_over(job: TeacherJob) -> tuple[Part, ...]:
    """Buffers that stay from the first batch on: of this rank's rows and columns; of all positions, under cp too."""
    name, t, size = job.settings.name, job.item_bytes, job.setup.size
    positions, phases = job.buffers * job.rows * job.width, (Phase.TEACHERS, *after_reading(job.config))
    if job.config.handoff.type == "logits":
        return (Part(name, "logits handed over", during(positions * job.columns * t, *phases)),)
    return (
        Part(name, "hidden states handed over", during(positions * size.hidden_size * t, *phases)),
        Part(name, "head handed over", during(job.columns * size.hidden_size * t, *phases)),
    )


def window_bytes(job: TeacherJob) -> int:
    """Output of a microbatch that a student's rank puts together, where a teacher's ranks end in the midst of one.

    Else it is read where it is, on another device as well.
    """
    micro = job.config.train.micro_batch_size
    if job.rows % micro == 0:
        return 0
    columns = job.setup.vocab_size if job.config.handoff.type == "logits" else job.setup.size.hidden_size
    return micro * job.width * columns * job.item_bytes
