"""GPU memory of a rollout server that shares the training's GPUs."""

from __future__ import annotations

from math import floor

from nemo_opd.config.rollout import ServerRollout
from nemo_opd.config.run import RunConfig
from nemo_opd.rollout.server.share import COMMON_SHARE, OWN_SHARE
from nemo_opd.training.memory.parts import USABLE, Memory, MemoryEstimate, Part, Phase
from nemo_opd.training.memory.situation import Machine

ASLEEP_BYTES = 2 * 2**30
"""Memory that a sleeping server keeps for CUDA, its libraries and captured graphs; an assumption, not measured."""
SERVER = "rollout server"


def shares_gpus(config: RunConfig, machine: Machine) -> bool:
    """Return whether a server is started on the training's GPUs, whose memory is known."""
    rollout = config.rollout
    shares = isinstance(rollout, ServerRollout) and rollout.shares_devices
    return shares and machine.device == "cuda" and machine.device_bytes is not None


def server_parts(config: RunConfig, machine: Machine) -> tuple[Part, ...]:
    """Return what the server has at least: its share while it samples, and little while it sleeps."""
    if not shares_gpus(config, machine):
        return ()
    rollout = config.rollout
    assert isinstance(rollout, ServerRollout)
    assert machine.device_bytes is not None
    awake = int((rollout.memory_share or COMMON_SHARE) * machine.device_bytes)
    asleep = ASLEEP_BYTES if rollout.sleeps_on_gpus else awake
    others = [phase for phase in Phase if phase not in (Phase.LOADING, Phase.ROLLOUT)]
    return (Part(SERVER, "its share", {Phase.ROLLOUT: awake, **dict.fromkeys(others, asleep)}),)


def server_share(config: RunConfig, estimate: MemoryEstimate, machine: Machine) -> float | None:
    """Return the share of a GPU that the server can have: the least, and what is left over when it needs it.

    None where it shares no GPUs, or their memory is unknown.
    """
    if not shares_gpus(config, machine):
        return None
    assert isinstance(config.rollout, ServerRollout)
    memory = estimate.memories[0]  # the student's first GPU, which the server uses
    return min(OWN_SHARE, COMMON_SHARE + _left(memory, sleeps=config.rollout.sleeps_on_gpus))


def _left(memory: Memory, *, sleeps: bool) -> float:
    assert memory.capacity is not None
    used = memory.total(Phase.ROLLOUT) if sleeps else memory.peak
    return max(0, floor(100 * (USABLE - used / memory.capacity))) / 100
