"""All that the estimate depends on, and the estimate itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

import psutil
import torch

from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.distributed.layout import Layout
from nemo_opd.training.memory.answers import are_asked, teacher_processes
from nemo_opd.training.memory.estimate import Memory, MemoryEstimate, Part, Phase
from nemo_opd.training.memory.process import ModelSetup, Process, with_cache
from nemo_opd.training.memory.rollout import with_rollouts
from nemo_opd.training.memory.size import ModelSize
from nemo_opd.training.memory.student import StudentJob, student_process
from nemo_opd.training.memory.teacher import TeacherJob, window_bytes
from nemo_opd.workers.student import compute_dtype


@dataclass(frozen=True, slots=True)
class Machine:
    """What a rank of each group finds."""

    device: str
    device_bytes: int | None
    """Of one GPU; None: not known, or there is none."""
    host_bytes: int | None
    """Main memory of a node; None: not known."""
    ranks_per_node: int
    """Devices in use, or on CPU ranks of the student."""

    @staticmethod
    def of_this_node(device: str, ranks_per_node: int, *, is_remote: bool) -> Machine:
        """is_remote: the run is on other machines; their GPUs are taken to be like those here, if there are any."""
        sees_gpu = device == "cuda" and torch.cuda.is_available()
        # Asking for what is free would open a context, which the driver's process has no other use for.
        device_bytes = torch.cuda.get_device_properties(0).total_memory if sees_gpu else None
        return Machine(device, device_bytes, None if is_remote else psutil.virtual_memory().total, ranks_per_node)

    @property
    def host_share(self) -> int | None:
        return None if self.host_bytes is None else self.host_bytes // self.ranks_per_node


@dataclass(frozen=True, slots=True)
class Situation:
    """What a run is, beside its settings."""

    student: ModelSetup
    teachers: tuple[ModelSetup, ...]
    """One per active teacher."""
    machine: Machine
    transport: str
    lookahead: int = 0
    """Batches that teachers on devices of their own are ahead."""
    headless: bool = False
    """The student's losses read hidden states and head, and its logits are never there."""
    gives_back: bool = False
    """A worker that has done its part of a step returns to the device what it does not hold any more."""
    arriving: int = 0
    """Bytes that a rank of the student keeps of what teachers on other nodes send."""

    @staticmethod
    def of(
        config: RunConfig,
        *,
        sizes: Sequence[ModelSize],
        vocab_sizes: Sequence[int],
        layouts: Sequence[Layout],
        lengths: Sequence[int] | None = None,
        machine: Machine,
        transport: str,
        lookahead: int,
        headless: bool,
        gives_back: bool,
        arriving: int = 0,
    ) -> Situation:
        """sizes, vocab_sizes (of the tokenizers), layouts, lengths (tokens of the longest sequence): of the student
        first, and of every active teacher.
        """
        whole = config.train.max_length
        stretches = [None if lengths is None else Fraction(lengths[i], whole) for i in range(len(sizes))]
        student, *teachers = (
            ModelSetup(size, vocab_size, layout, settings.parallelism.sequence_parallel, stretch)
            for settings, size, vocab_size, layout, stretch in zip(
                (config.student, *config.active_teachers), sizes, vocab_sizes, layouts, stretches, strict=True
            )
        )
        return Situation(student, tuple(teachers), machine, transport, lookahead, headless, gives_back, arriving)


def estimate(config: RunConfig, situation: Situation) -> MemoryEstimate:
    """Bytes on one rank by part and phase, with the settings as they are; `offload: auto` counts as no.

    Whole numbers of what PyTorch allocates for tensors, from the models' shapes; METHODS §8 says what losses keep.
    """
    job = student_job(config, situation)
    student = with_rollouts(student_process(job), job)
    machine = situation.machine
    shared = machine.device == "cpu" or config.cluster.placement == "colocated"
    teachers = teacher_processes(config, teacher_jobs(config, situation), shared=shared)
    processes = [student, *teachers]
    memories: tuple[Memory, ...]
    if machine.device == "cpu":
        parts = [part for process in processes for part in (*process.device, *process.host)]
        memories = (Memory("main memory for each rank", tuple(parts), machine.host_share),)
    else:
        memories = (*on_devices(config, student, teachers, situation), on_host(processes, machine))
    return MemoryEstimate(tuple(replace(memory, phases=phases_of(config)) for memory in memories))


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    there = {Phase.ANSWERS: are_asked(config), Phase.ROLLOUT: isinstance(config.rollout, HFRollout)}
    return tuple(phase for phase in Phase if there.get(phase, True))


def on_devices(
    config: RunConfig, student: Process, teachers: Sequence[Process], situation: Situation
) -> tuple[Memory, ...]:
    """One GPU for a rank of each group, or one of each group's."""
    machine = situation.machine
    if config.cluster.placement == "colocated":
        parts = [
            part
            for process in (student, *teachers)
            for part in with_cache(process, gives_back=process.is_offloaded or situation.gives_back)
        ]
        return (Memory("each GPU", tuple(parts), machine.device_bytes),)
    names = ["each GPU of the student"] + [f"each GPU of {teacher.name}" for teacher in config.active_teachers]
    processes = zip(names, (student, *teachers), strict=True)
    return tuple(
        Memory(name, with_cache(process, gives_back=True), machine.device_bytes) for name, process in processes
    )


def on_host(processes: Sequence[Process], machine: Machine) -> Memory:
    parts: tuple[Part, ...] = tuple(part for process in processes for part in process.host)
    return Memory("main memory for each GPU", parts, machine.host_share)


def student_job(config: RunConfig, situation: Situation) -> StudentJob:
    device, student = situation.machine.device, situation.student
    return StudentJob(
        config=config,
        setup=student,
        device=device,
        compute_bytes=compute_dtype(config.student.dtype, device).itemsize,
        headless=situation.headless,
        widest_vocabulary=max(setup.vocab_size for setup in (student, *situation.teachers)),
        window=sum(map(window_bytes, teacher_jobs(config, situation))),
        arriving=situation.arriving,
    )


def teacher_jobs(config: RunConfig, situation: Situation) -> list[TeacherJob]:
    return [
        TeacherJob(config, settings, setup, situation.machine.device, situation.transport, 1 + situation.lookahead)
        for settings, setup in zip(config.active_teachers, situation.teachers, strict=True)
    ]
