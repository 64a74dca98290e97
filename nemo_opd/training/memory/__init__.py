"""Estimate of each rank's memory from the models' configurations, and the offloading it decides."""

from nemo_opd.training.memory.estimate import estimate, server_share
from nemo_opd.training.memory.formulas import state_bytes
from nemo_opd.training.memory.offload import settle_memory
from nemo_opd.training.memory.parts import Memory, MemoryEstimate, Part, Phase
from nemo_opd.training.memory.situation import Machine, MemoryInputs, ModelSetup

__all__ = [
    "Machine",
    "Memory",
    "MemoryEstimate",
    "MemoryInputs",
    "ModelSetup",
    "Part",
    "Phase",
    "estimate",
    "server_share",
    "settle_memory",
    "state_bytes",
]
