"""What has to be sent between nodes before a batch can be read: pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_opd.handoff.base import Handle
from nemo_opd.handoff.hidden_states import HiddenStatesWindow
from nemo_opd.handoff.parcel import Parcel
from nemo_opd.handoff.window import Window


@dataclass(frozen=True, slots=True)
class Sending:
    """A parcel and its reader."""

    parcel: Parcel
    student_rank: int


@dataclass(frozen=True, slots=True)
class Round:
    """What goes from one teacher to the student; each pair of ranks has its parcels in one order on both sides."""

    sendings: tuple[tuple[Sending, ...], ...]
    """By rank of the teacher."""
    arrivals: tuple[tuple[Handle, ...], ...]
    """By rank of the student."""

    @property
    def is_empty(self) -> bool:
        return not any(self.arrivals)


class Post:
    """Of one teacher: its output of every batch, and its head once for each reader."""

    def __init__(self, num_teacher_ranks: int) -> None:
        self._num_teacher_ranks = num_teacher_ranks
        self._kept: set[tuple[int, str, int]] = set()
        """Student rank, and sender and allocation of what it keeps."""

    def round(self, windows: Sequence[Window]) -> Round:
        """For windows by rank of the student, which are sent what they need from other nodes and do not have."""
        sendings: list[list[Sending]] = [[] for _ in range(self._num_teacher_ranks)]
        arrivals = []
        for rank, window in enumerate(windows):
            handles = [handle for handle in constants(window) if self._is_new(rank, handle)] + list(outputs(window))
            own = [(handle, token) for handle in handles if isinstance(token := handle.token(rank), Parcel)]
            arrivals.append(tuple(handle for handle, _ in own))
            for _, parcel in own:
                sendings[parcel.rank].append(Sending(parcel, rank))
        return Round(tuple(map(tuple, sendings)), tuple(arrivals))

    def _is_new(self, rank: int, handle: Handle) -> bool:
        key = rank, handle.sender, handle.allocation
        is_new = key not in self._kept
        self._kept.add(key)
        return is_new


def outputs(window: Window) -> Iterator[Handle]:
    """Handles to what every batch writes anew, each once."""
    regions = (window.hidden,) if isinstance(window, HiddenStatesWindow) else window.shards
    yield from dict.fromkeys(part.handle for region in regions for part in region.parts)


def constants(window: Window) -> Iterator[Handle]:
    """Handles to what is written once."""
    if isinstance(window, HiddenStatesWindow):
        for shard in window.head:
            yield shard.weight
            if shard.bias is not None:
                yield shard.bias
