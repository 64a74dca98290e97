"""The estimate: bytes on a rank by part and phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

USABLE = 0.95
"""Share of a memory that a plan may use: allocators leave gaps, and libraries have buffers."""
SLACK = 1.25
"""Room for what need not be, as a multiple of the estimate, which is right within 20 %."""


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
    """Memory of one purpose in one worker."""

    owner: str
    """`student` or a teacher's name."""
    name: str
    num_bytes: Mapping[Phase, int]
    """Bytes by phase; a missing phase has none."""
    on_host: bool = False
    """Whether it is in main memory, whatever the device."""
    in_turn: bool = False
    """Whether a teacher has it only while it works: where several share a device, one at a time has such parts."""

    def __str__(self) -> str:
        return f"{self.owner}: {self.name}"

    def at(self, phase: Phase) -> int:
        return self.num_bytes.get(phase, 0)


def part(owner: str, name: str, num_bytes: int, *phases: Phase, on_host: bool = False, in_turn: bool = False) -> Part:
    """Return a part that is equally large in these phases."""
    return Part(owner, name, dict.fromkeys(phases, num_bytes), on_host, in_turn)


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory of a rank: its share of a GPU, or of a machine's main memory."""

    name: str
    parts: tuple[Part, ...]
    capacity: int | None
    """Bytes available to a rank; None if unknown."""
    phases: tuple[Phase, ...] = tuple(Phase)
    """Phases of the run."""

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
        """Bytes by which the peak exceeds the usable capacity; 0 where it fits or the capacity is unknown."""
        return 0 if self.capacity is None else max(0, self.peak - int(USABLE * self.capacity))


@dataclass(frozen=True, slots=True)
class Advice:
    """A setting that lowers the peak of the memory that is short."""

    setting: str
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """All memories of a rank."""

    memories: tuple[Memory, ...]
    """Memories of devices, then of the host."""
    block_bytes: int
    """Budget that they count for a block of the student's logits, and for the temporaries of a loss."""
    caches_fit: bool = False
    """Whether all processes of a GPU may keep what PyTorch caches at their peaks."""
    advice: tuple[Advice, ...] = ()
    """Settings that save memory where the run does not fit, largest saving first."""

    @property
    def shortest(self) -> Memory:
        """The memory with the largest shortage, or else the largest peak."""
        return max(self.memories, key=lambda memory: (memory.shortage, memory.peak))

    @property
    def fits(self) -> bool:
        return not self.shortest.shortage

    @property
    def fits_easily(self) -> bool:
        """Whether it fits where the estimate is too low."""
        return all(each.capacity is None or SLACK * each.peak <= USABLE * each.capacity for each in self.memories)
