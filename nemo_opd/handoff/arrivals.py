"""The end of a student's rank of the links to teachers on other nodes."""

from __future__ import annotations

from collections.abc import Sequence

from nemo_opd.handoff.base import Handle, Receiver
from nemo_opd.handoff.link import Link, Meeting
from nemo_opd.handoff.parcel import Parcel


class Arrivals:
    """Puts what is sent where the rank's receiver finds it."""

    def __init__(self, receiver: Receiver, device: str) -> None:
        self._receiver, self._device = receiver, device
        self._links: list[Link | None] = []

    def join(self, meetings: Sequence[Meeting | None]) -> None:
        """By teacher; None: nothing of it is sent. Every rank must call it."""
        rank = self._receiver.number
        self._links = [None if each is None else Link(each, each.student(rank), self._device) for each in meetings]

    def receive(self, arrivals: Sequence[Sequence[Handle]]) -> None:
        """By teacher what its ranks send now. Raises RuntimeError where one of them is gone."""
        for link, handles in zip(self._links, arrivals, strict=True):
            if link is not None:
                parcels = [(handle, handle.token(self._receiver.number)) for handle in handles]
                link.receive(
                    [
                        (self._receiver.room(handle, self._device), parcel.rank)
                        for handle, parcel in parcels
                        if isinstance(parcel, Parcel)
                    ]
                )

    def close(self) -> None:
        """May be called again."""
        for link in self._links:
            if link is not None:
                link.close()
