"""How far workers are, for the driver's display: rank 0 of a group writes it into the group's store, where the driver
reads it.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Protocol

from nemo_opd.progress import Work, announced, current

KEY = "progress"
TOLD_EVERY_S = 1.0
ANSWER_S = 5.0
"""Longest wait for the store."""


class Store(Protocol):
    """What is used of `torch.distributed.Store`."""

    def set(self, key: str, value: str, /) -> None: ...

    def get(self, key: str, /) -> bytes: ...

    def check(self, keys: list[str], /) -> bool: ...


class Teller:
    """Writes what this process is doing into the store, in a thread of its own, while it changes."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        """connect: opens a connection for this thread alone."""
        self._connect = connect
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            store, before = self._connect(), encoded(None)
            while not self._closed.wait(TOLD_EVERY_S):
                if (now := encoded(current())) != before:
                    store.set(KEY, now)
                    before = now
        except RuntimeError:
            return  # the store is gone, and so is who would read

    def close(self) -> None:
        self._closed.set()
        self._thread.join(ANSWER_S)


class Watch:
    """The work of one group as the driver sees it; it is announced here while the group does it."""

    def __init__(self, group: str, connect: Callable[[], Store | None]) -> None:
        """connect: the group's store, or None while it is not there yet."""
        self._group, self._connect = group, connect
        self._store: Store | None = None
        self._shown: Work | None = None
        self._announced = ExitStack()
        self._is_lost = False

    def look(self) -> None:
        """Show what the group does now. A group that does not answer is not asked again."""
        if self._is_lost:
            return
        try:
            self._store = self._store or self._connect()
            told = self._store.get(KEY) if self._store is not None and self._store.check([KEY]) else None
        except RuntimeError:
            self._is_lost = True
            told = None
        self._show(None if told is None else decoded(told, self._group))

    def _show(self, work: Work | None) -> None:
        shown = self._shown
        if shown is not None and work is not None and (shown.name, shown.total) == (work.name, work.total):
            shown.done = work.done
            return
        self.clear()
        if work is not None:
            self._announced.enter_context(announced(work))
            self._shown = work

    def clear(self) -> None:
        """Show nothing of it."""
        self._announced.close()
        self._shown = None


def encoded(work: Work | None) -> str:
    return json.dumps(None if work is None else [work.name, work.total, work.unit, work.look()])


def decoded(told: bytes, group: str) -> Work | None:
    told_work = json.loads(told)
    if told_work is None:
        return None
    name, total, unit, done = told_work
    return Work(f"{group}: {name}", total, unit, done)
