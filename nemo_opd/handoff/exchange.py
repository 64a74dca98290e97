"""Pure planning of the messages between nodes that windows need before they are read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from nemo_opd.handoff.handle import Handle, Message
from nemo_opd.handoff.hidden_states import HiddenStatesWindow
from nemo_opd.handoff.window import Window


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages of one batch from one teacher, in the same order on both sides for each pair of ranks."""

    sends: tuple[tuple[Message, ...], ...]
    """Messages of each teacher rank."""
    receives: tuple[tuple[Handle, ...], ...]
    """Handles that each student rank reads its messages with."""

    @property
    def is_empty(self) -> bool:
        return not any(self.receives)


class ExchangePlanner:
    """Exchanges of one teacher: its output in every batch, and its head once for each reader."""

    def __init__(self, num_teacher_ranks: int) -> None:
        self._num_teacher_ranks = num_teacher_ranks
        self._sent_heads: set[tuple[int, str, int]] = set()
        """(student rank, sender, version) of each head that has been sent."""

    def plan(self, windows: Sequence[Window]) -> Exchange:
        """Return the messages that the student ranks' windows need and have not received yet."""
        sends: list[list[Message]] = [[] for _ in range(self._num_teacher_ranks)]
        receives: list[list[Handle]] = []
        for student_rank, window in enumerate(windows):
            heads = [handle for handle in _head_handles(window) if self._is_new(student_rank, handle)]
            receives.append([])
            for handle in (*heads, *_output_handles(window)):
                if isinstance(message := handle.token(student_rank), Message):
                    receives[-1].append(handle)
                    sends[message.teacher_rank].append(message)
        return Exchange(tuple(map(tuple, sends)), tuple(map(tuple, receives)))

    def _is_new(self, student_rank: int, handle: Handle) -> bool:
        key = student_rank, handle.sender, handle.version
        is_new = key not in self._sent_heads
        self._sent_heads.add(key)
        return is_new


def _output_handles(window: Window) -> Iterator[Handle]:
    regions = (window.hidden,) if isinstance(window, HiddenStatesWindow) else window.shards
    for region in regions:
        for part in region.parts:
            yield part.handle


def _head_handles(window: Window) -> Iterator[Handle]:
    if isinstance(window, HiddenStatesWindow):
        for shard in window.head:
            yield shard.weight
            if shard.bias is not None:
                yield shard.bias
