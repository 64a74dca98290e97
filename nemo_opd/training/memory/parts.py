"""Data classes of the estimate: bytes on a rank by part and phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

USABLE = 0.95
"""Share of a memory that a plan may use: allocators fragment it, and libraries have buffers."""
SLACK = 1.25
"""Factor on the estimate, which is right within 20 %, before spending memory on optional things."""


class Phase(StrEnum):
    LOADING = "loading"
    ANSWERS = "answers"
    """Teachers answer the evaluation's questions, before the first step."""
    ROLLOUT = "rollout"
    """The student samples in its own workers."""
    TEACHERS = "teachers"
    """The teachers' forward passes."""
    LOSS = "forward, loss"
    """The student's forward pass up to the gradient of its logits or last hidden states."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


LOADED: tuple[Phase, ...] = tuple(phase for phase in Phase if phase is not Phase.LOADING)
STUDENT_PHASES: tuple[Phase, ...] = (Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)
STEP: tuple[Phase, ...] = (Phase.ROLLOUT, Phase.TEACHERS, *STUDENT_PHASES)


@dataclass(frozen=True, slots=True)
class Part:
    """Memory for one purpose in one worker."""

    owner: str
    """`student` or a teacher's name."""
    name: str
    num_bytes: Mapping[Phase, int]
    """Bytes by phase; 0 in a missing phase."""
    on_host: bool = False
    """Whether it is in main memory even if the device is a GPU."""
    in_turn: bool = False
    """Whether a teacher has it only while it computes; teachers on the same device take turns."""

    def __str__(self) -> str:
        return f"{self.owner}: {self.name}"

    def at(self, phase: Phase) -> int:
        return self.num_bytes.get(phase, 0)


def constant_part(
    owner: str, name: str, num_bytes: int, *phases: Phase, on_host: bool = False, in_turn: bool = False
) -> Part:
    """Return a part of the same size in each of `phases`."""
    return Part(owner, name, dict.fromkeys(phases, num_bytes), on_host, in_turn)


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory of a rank: a GPU, or a share of a node's main memory."""

    name: str
    parts: tuple[Part, ...]
    capacity: int | None
    """Bytes available to a rank; None if unknown."""
    phases: tuple[Phase, ...] = tuple(Phase)
    """Phases that the run has."""

    def total(self, phase: Phase) -> int:
        return sum(part.at(phase) for part in self.parts)

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)

    @property
    def shortage(self) -> int:
        """Peak minus usable capacity in bytes; 0 if it fits or the capacity is unknown."""
        return 0 if self.capacity is None else max(0, self.peak - int(USABLE * self.capacity))


@dataclass(frozen=True, slots=True)
class Advice:
    """Change of a setting that lowers the peak of the memory that is short."""

    setting: str
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Estimate for all memories of a rank."""

    memories: tuple[Memory, ...]
    """Devices first, then main memory."""
    block_bytes: int
    """Byte budget assumed for a block of the student's logits, and for a loss's temporaries."""
    caches_fit: bool = False
    """Whether a GPU has room for the PyTorch caches of all its processes at their peaks."""
    advice: tuple[Advice, ...] = ()
    """Changes that save memory if the run does not fit, largest saving first."""

    @property
    def shortest(self) -> Memory:
        """The memory with the largest shortage; ties go to the largest peak."""
        return max(self.memories, key=lambda memory: (memory.shortage, memory.peak))

    @property
    def fits(self) -> bool:
        return not self.shortest.shortage

    @property
    def fits_easily(self) -> bool:
        """Whether it still fits if the estimate is too low by the factor SLACK."""
        return all(
            memory.capacity is None or SLACK * memory.peak <= USABLE * memory.capacity for memory in self.memories
        )
