"""Every rank's memory in every phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from math import floor

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.rollout.server.share import COMMON_SHARE, OWN_SHARE
from nemo_opd.training.memory.parts import LOADED, SLACK, USABLE, Memory, MemoryEstimate, Part, Phase, part
from nemo_opd.training.memory.processes import student_parts, teacher_processes
from nemo_opd.training.memory.situation import Machine, Situation
from nemo_opd.training.sampling_batches import student_samples, teachers_answer

CONTEXT_BYTES = 512 * 2**20
"""GPU memory of CUDA and its libraries in each process."""
ASLEEP_BYTES = 2 * 2**30
"""Memory that a sleeping server keeps for CUDA, its libraries and captured graphs; an assumption, not measured."""
SERVER = "rollout server"


def estimate(config: RunConfig, situation: Situation) -> MemoryEstimate:
    """Return the bytes on one rank by part and phase, with the settings as they are; `offload: auto` counts as no.

    Parameters, gradients, optimizer state, handoff buffers and caches are exact; activations are estimated. Processes
    that share a GPU return to it what PyTorch caches, so each phase counts what is alive.
    """
    machine, is_separate = situation.machine, config.cluster.placement == "separate"
    processes = _processes(config, situation)
    devices = [[each for each in own if not each.on_host or machine.device == "cpu"] for own in processes]
    counted = [_counted(own) for own in (devices if is_separate else [chain(*devices)])]
    if machine.device == "cpu":
        memories = [("main memory for each rank", tuple(chain(*counted)), machine.host_share)]
    else:
        others = [each.name for each in config.active_teachers if not each.is_student]
        names = [f"each GPU of {name}" for name in ("the student", *others)] if is_separate else ["each GPU"]
        memories = [(name, parts, machine.device_bytes) for name, parts in zip(names, counted, strict=True)]
        host = (each for each in chain(*processes) if each.on_host)
        memories.append(("main memory for each GPU", _counted(host), machine.host_share))
    samples = any((student_samples(config), _sharing_server(config, machine), situation.student.longest_question))
    there = {Phase.ANSWERS: teachers_answer(config), Phase.ROLLOUT: samples}
    phases = tuple(phase for phase in Phase if there.get(phase, True))
    # What PyTorch caches is what each process holds in its own largest phase.
    cached = sum(max(sum(each.at(phase) for each in own) for phase in Phase) for own in devices)
    caches_fit = machine.device_bytes is not None and SLACK * cached < USABLE * machine.device_bytes
    return MemoryEstimate(tuple(Memory(*each, phases) for each in memories), situation.block_bytes, caches_fit)


def _processes(config: RunConfig, situation: Situation) -> list[list[Part]]:
    """Return the parts of a rank's processes, the student's first: teachers with its weights and servers are in it."""
    found = [student_parts(config, situation) + _server_parts(config, situation.machine)]
    for teacher in teacher_processes(config, situation):
        if teacher.settings.is_student:
            found[0] += teacher.parts()
        else:
            found.append(teacher.parts())
    if situation.device == "cuda":
        found = [[*own, part(own[0].owner, "CUDA", CONTEXT_BYTES, *Phase)] for own in found]
    return found


def _counted(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Return the parts of one memory by name: of teachers at work, in each phase those of the one that needs most."""
    parts = tuple(parts)
    needed: Counter[tuple[Phase, str]] = Counter()
    for each in parts:
        needed.update({(phase, each.owner): number * each.in_turn for phase, number in each.num_bytes.items()})
    largest = dict(sorted(needed, key=needed.__getitem__))  # the last of each phase
    by_name: dict[tuple[str, str], Counter[Phase]] = {}
    for each in parts:
        counts = (phase for phase in each.num_bytes if not each.in_turn or largest[phase] == each.owner)
        by_name.setdefault((each.owner, each.name), Counter()).update({phase: each.at(phase) for phase in counts})
    return tuple(Part(owner, name, num_bytes) for (owner, name), num_bytes in by_name.items())


def _sharing_server(config: RunConfig, machine: Machine) -> ServerRollout | None:
    """Return the server that is started on the training's GPUs, whose memory is known; None where there is none."""
    server = config.rollout
    if isinstance(server, ServerRollout) and server.shares_devices and machine.device_bytes is not None:
        return server
    return None


def _server_parts(config: RunConfig, machine: Machine) -> list[Part]:
    """Return what the server has at least: its share while it samples, and little while it sleeps."""
    if (server := _sharing_server(config, machine)) is None:
        return []
    awake = int((server.memory_share or COMMON_SHARE) * (machine.device_bytes or 0))
    asleep = ASLEEP_BYTES if server.sleeps_on_gpus else awake
    return [Part(SERVER, "its share", dict.fromkeys(LOADED, asleep) | {Phase.ROLLOUT: awake})]


def server_share(config: RunConfig, estimated: MemoryEstimate, machine: Machine) -> float | None:
    """Return the share of a GPU that the server can have: the least, and what is left over when it needs it.

    None where it shares no GPUs, or their memory is unknown.
    """
    if (server := _sharing_server(config, machine)) is None:
        return None
    memory = estimated.memories[0]  # the student's first GPU, which the server uses
    used = memory.total(Phase.ROLLOUT) if server.sleeps_on_gpus else memory.peak
    left = max(0, floor(100 * (USABLE - used / (machine.device_bytes or 1)))) / 100
    return min(OWN_SHARE, COMMON_SHARE + left)
