"""Every rank's memory in every phase."""

from __future__ import annotations

from nemo_opd.config.rollout import HFRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.training.memory.parts import Memory, MemoryEstimate, Part, Phase, Process, part
from nemo_opd.training.memory.situation import Situation
from nemo_opd.training.memory.student import student_process
from nemo_opd.training.memory.teacher import are_asked, teacher_processes

CONTEXT_BYTES = 512 * 2**20
"""GPU memory of CUDA and its libraries in each process."""


def estimate(config: RunConfig, situation: Situation) -> MemoryEstimate:
    """Return the bytes on one rank by part and phase, with the settings as they are; `offload: auto` counts as no.

    Parameters, gradients, optimizer state, handoff buffers and caches are exact; activations are estimated. Processes
    that share a GPU return to it what PyTorch caches, so each phase counts what is alive.
    """
    machine = situation.machine
    processes = [student_process(config, situation), *teacher_processes(config, situation)]
    host = tuple(part for process in processes for part in process.host)
    if machine.device == "cpu":
        parts = [part for process in processes for part in process.device]
        memories = [("main memory for each rank", (*parts, *host), machine.host_share)]
    else:
        devices = [_with_context(process) for process in processes]
        if config.cluster.placement == "colocated":
            memories = [("each GPU", sum(devices, ()), machine.device_bytes)]
        else:
            names = ("the student", *config.active_names)
            memories = [
                (f"each GPU of {name}", parts, machine.device_bytes) for name, parts in zip(names, devices, strict=True)
            ]
        memories.append(("main memory for each GPU", host, machine.host_share))
    there = {Phase.ANSWERS: are_asked(config), Phase.ROLLOUT: isinstance(config.rollout, HFRollout)}
    phases = tuple(phase for phase in Phase if there.get(phase, True))
    return MemoryEstimate(tuple(Memory(name, parts, capacity, phases) for name, parts, capacity in memories))


def _with_context(process: Process) -> tuple[Part, ...]:
    return (*process.device, part(process.device[0].owner, "CUDA", CONTEXT_BYTES, *Phase))
