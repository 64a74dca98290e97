"""Estimate of a rank's memory in every phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from math import floor

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.rollout.server.share import COMMON_SHARE, OWN_SHARE
from nemo_opd.training.memory.parts import LOADED, SLACK, USABLE, Memory, MemoryEstimate, Part, Phase, constant_part
from nemo_opd.training.memory.processes import student_parts, teacher_processes
from nemo_opd.training.memory.situation import Machine, MemoryInputs
from nemo_opd.training.sampling_batches import student_samples, teachers_answer

CONTEXT_BYTES = 512 * 2**20
"""GPU memory of CUDA and its libraries per process."""
ASLEEP_BYTES = 2 * 2**30
"""GPU memory of a sleeping server: CUDA, its libraries, captured graphs. Assumed, not measured."""
SERVER = "rollout server"


def estimate(config: RunConfig, situation: MemoryInputs) -> MemoryEstimate:
    """Return the bytes on one rank by part and phase, with the settings as they are: `offload: auto` counts as false.

    Parameters, gradients, optimizer state, handoff buffers and caches are exact; activations are estimated. Processes
    that share a GPU empty PyTorch's cache for each other, so each phase counts only live memory.
    """
    machine, is_separate = situation.machine, config.cluster.placement == "separate"
    processes = _processes(config, situation)
    devices = [[part for part in parts if not part.on_host or machine.device == "cpu"] for parts in processes]
    merged = [_merge(parts) for parts in (devices if is_separate else [chain(*devices)])]
    if machine.device == "cpu":
        memories = [("main memory for each rank", tuple(chain(*merged)), machine.host_share)]
    else:
        teachers = [teacher.name for teacher in config.active_teachers if not teacher.is_student]
        names = [f"each GPU of {name}" for name in ("the student", *teachers)] if is_separate else ["each GPU"]
        memories = [(name, parts, machine.device_bytes) for name, parts in zip(names, merged, strict=True)]
        host = (part for part in chain(*processes) if part.on_host)
        memories.append(("main memory for each GPU", _merge(host), machine.host_share))
    samples = any((student_samples(config), _sharing_server(config, machine), situation.student.longest_question))
    has_phase = {Phase.ANSWERS: teachers_answer(config), Phase.ROLLOUT: samples}
    phases = tuple(phase for phase in Phase if has_phase.get(phase, True))
    # PyTorch's cache grows to the memory of each process in its largest phase.
    cached = sum(max(sum(part.at(phase) for part in parts) for phase in Phase) for parts in devices)
    caches_fit = machine.device_bytes is not None and SLACK * cached < USABLE * machine.device_bytes
    return MemoryEstimate(tuple(Memory(*memory, phases) for memory in memories), situation.block_bytes, caches_fit)


def _processes(config: RunConfig, situation: MemoryInputs) -> list[list[Part]]:
    """Return the parts of each process of a rank.

    The student's process is first, and has the parts of teachers with its weights and of a rollout server.
    """
    processes = [student_parts(config, situation) + _server_parts(config, situation.machine)]
    for teacher in teacher_processes(config, situation):
        if teacher.settings.is_student:
            processes[0] += teacher.parts()
        else:
            processes.append(teacher.parts())
    if situation.device == "cuda":
        for parts in processes:
            parts.append(constant_part(parts[0].owner, "CUDA", CONTEXT_BYTES, *Phase))
    return processes


def _merge(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Add up the parts of one memory that have the same owner and name.

    Teachers take turns, so each phase counts the `in_turn` parts of the largest owner only.
    """
    parts = tuple(parts)
    in_turn_bytes: Counter[tuple[Phase, str]] = Counter()
    for part in parts:
        in_turn_bytes.update({(phase, part.owner): number * part.in_turn for phase, number in part.num_bytes.items()})
    largest_owner = dict(sorted(in_turn_bytes, key=in_turn_bytes.__getitem__))  # a later item replaces an earlier one
    merged: dict[tuple[str, str], Counter[Phase]] = {}
    for part in parts:
        phases = (phase for phase in part.num_bytes if not part.in_turn or largest_owner[phase] == part.owner)
        merged.setdefault((part.owner, part.name), Counter()).update({phase: part.at(phase) for phase in phases})
    return tuple(Part(owner, name, num_bytes) for (owner, name), num_bytes in merged.items())


def _sharing_server(config: RunConfig, machine: Machine) -> ServerRollout | None:
    """Return the rollout server on the training GPUs, or None if there is none or the GPUs' memory is unknown."""
    server = config.rollout
    if isinstance(server, ServerRollout) and server.shares_devices and machine.device_bytes is not None:
        return server
    return None


def _server_parts(config: RunConfig, machine: Machine) -> list[Part]:
    """Return the server's memory: `rollout.memory_share` or the least share; little while it sleeps."""
    if (server := _sharing_server(config, machine)) is None:
        return []
    awake = int((server.memory_share or COMMON_SHARE) * (machine.device_bytes or 0))
    asleep = ASLEEP_BYTES if server.sleeps_on_gpus else awake
    return [Part(SERVER, "its share", dict.fromkeys(LOADED, asleep) | {Phase.ROLLOUT: awake})]


def server_share(config: RunConfig, estimated: MemoryEstimate, machine: Machine) -> float | None:
    """Return the share of a GPU's memory for the server: the least share plus the memory that is always free.

    If the server sleeps, only the rollout phase counts. None if it does not share GPUs or their memory is unknown.
    """
    if (server := _sharing_server(config, machine)) is None:
        return None
    memory = estimated.memories[0]  # the student's first GPU, which the server uses
    used = memory.total(Phase.ROLLOUT) if server.sleeps_on_gpus else memory.peak
    free = max(0, floor(100 * (USABLE - used / (machine.device_bytes or 1)))) / 100
    return min(OWN_SHARE, COMMON_SHARE + free)
