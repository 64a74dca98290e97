"""What a rank holds in which phase of a run, before anything loads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

USABLE = 0.95
"""Share of a memory that can be planned with: allocators leave gaps, and libraries have buffers of their own."""


class Phase(StrEnum):
    LOADING = "loading"
    ANSWERS = "answers"
    """A teacher answers the evaluation's questions, before the first step; one at a time where they share a device."""
    ROLLOUT = "rollout"
    """The student samples, in its own workers."""
    TEACHERS = "teachers"
    """The teachers' forward passes, all at the same time."""
    LOSS = "forward, loss"
    """The student's forward pass up to the gradient of its logits or last hidden states."""
    BACKWARD = "backward"
    OPTIMIZER = "optimizer"


STUDENT_PHASES = (Phase.LOSS, Phase.BACKWARD, Phase.OPTIMIZER)


@dataclass(frozen=True, slots=True)
class Part:
    owner: str
    """The student, or a teacher's name."""
    name: str
    num_bytes: Mapping[Phase, int]
    """Where a phase is missing there is nothing of it."""

    def __str__(self) -> str:
        return f"{self.owner}: {self.name}"

    def at(self, phase: Phase) -> int:
        return self.num_bytes.get(phase, 0)


@dataclass(frozen=True, slots=True)
class Memory:
    """One memory of a rank: its share of a GPU, or of a machine's main memory."""

    name: str
    parts: tuple[Part, ...]
    capacity: int | None
    """Bytes there are for a rank; None: not known."""
    phases: tuple[Phase, ...] = tuple(Phase)
    """Those of the run."""

    def total(self, phase: Phase) -> int:
        return sum(part.at(phase) for part in self.parts)

    @property
    def peak_phase(self) -> Phase:
        return max(self.phases, key=self.total)

    @property
    def peak(self) -> int:
        """The most at any time."""
        return self.total(self.peak_phase)

    @property
    def shortage(self) -> int:
        """Bytes by which the peak is more than can be planned with; 0 where it fits or nobody knows."""
        return 0 if self.capacity is None else max(0, self.peak - int(USABLE * self.capacity))


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of settings, and what it would bring."""

    setting: str
    saved_bytes: int
    """Of the peak of the memory that is short."""


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    memories: tuple[Memory, ...]
    """The devices first, then the host."""
    advice: tuple[Advice, ...] = ()
    """Where it does not fit, best first."""

    @property
    def shortest(self) -> Memory:
        """The memory that is missing most, or is used most."""
        return max(self.memories, key=lambda memory: (memory.shortage, memory.peak))

    @property
    def fits(self) -> bool:
        return not self.shortest.shortage


def during(num_bytes: int, *phases: Phase) -> dict[Phase, int]:
    return dict.fromkeys(phases, num_bytes)
