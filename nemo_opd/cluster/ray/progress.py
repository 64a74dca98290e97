"""How far workers are, for the driver's display: rank 0 of a group writes it into the group's store, where the driver
reads it.
"""

from __future__ import annotations

import json
import threading
import time
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
    """Writes what this process is doing into the store, in a thread of its own."""

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
    """The work of one group as the driver sees it; it is announced here while the group does it.

    A thread asks, because a store whose process is stopped never answers, and whoever waits for it hears no signal.
    """

    def __init__(self, group: str, connect: Callable[[], Store | None]) -> None:
        """connect: the group's store, or None while it is not there yet; called from the thread."""
        self._group, self._connect = group, connect
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._is_looked_at, self._is_over = False, threading.Event()
        self._told: Work | None = None
        self._shown: Work | None = None
        self._announced = ExitStack()

    def look(self) -> None:
        """Show what the group was last known to do, without waiting. After an error it is not asked again."""
        self._is_looked_at = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._ask, name=f"progress of {self._group}", daemon=True)
            self._thread.start()
        self._show(self._told)

    def _ask(self) -> None:
        try:
            while not self._is_over.is_set():
                if self._is_looked_at:
                    self._store = self._store or self._connect()
                    told = self._read(self._store) if self._store is not None else None
                    self._told = told if self._is_looked_at else None
                self._is_over.wait(TOLD_EVERY_S)
        except Exception:  # whatever has failed is for the call to report
            self._told = None

    def _read(self, store: Store) -> Work | None:
        return decoded(store.get(KEY), self._group) if store.check([KEY]) else None

    def _show(self, work: Work | None) -> None:
        shown = self._shown
        if shown is not None and work is not None and (shown.name, shown.total) == (work.name, work.total):
            shown.done, shown.started = work.done, work.started
            return
        self._hide()
        if work is not None:
            self._announced.enter_context(announced(work))
            self._shown = work

    def _hide(self) -> None:
        self._announced.close()
        self._shown = None

    def clear(self) -> None:
        """Show nothing of it, and do not ask until the next look."""
        self._is_looked_at, self._told = False, None
        self._hide()

    def close(self) -> None:
        """End the thread, unless it waits for a store that never answers."""
        self._is_over.set()
        self.clear()


def encoded(work: Work | None) -> str:
    told = None if work is None else [work.name, work.total, work.unit, work.look(), round(work.elapsed_s, 1)]
    return json.dumps(told)


def decoded(told: bytes, group: str) -> Work | None:
    told_work = json.loads(told)
    if told_work is None:
        return None
    name, total, unit, done, elapsed_s = told_work
    return Work(f"{group}: {name}", total, unit, done, started=time.monotonic() - elapsed_s)
