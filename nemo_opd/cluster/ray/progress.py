"""Progress of workers for the driver's display, passed through each group's store by its rank 0."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

from torch.distributed import Store

from nemo_opd.progress import Work, announced, current

KEY = "progress"
_INTERVAL_S = 1.0
ANSWER_S = 5.0
"""Limit of the wait for the store."""


class ProgressReporter:
    """A thread that writes the current work of this process into the store."""

    def __init__(self, connect: Callable[[], Store]) -> None:
        """Start the thread. connect: opens a connection for this thread only."""
        self._connect = connect
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            store, written = self._connect(), encoded(None)
            while not self._closed.wait(_INTERVAL_S):
                if (work := encoded(current())) != written:
                    store.set(KEY, work)
                    written = work
        except RuntimeError:
            return  # the store has ended, so nobody reads

    def close(self) -> None:
        self._closed.set()
        self._thread.join(ANSWER_S)


class ProgressMonitor:
    """Display of one group's current work in the driver.

    A thread reads the store, because a stopped process never answers, and waiting for it would block signals.
    """

    def __init__(self, group: str, connect: Callable[[], Store | None]) -> None:
        """connect: returns the group's store, or None if it is not served yet; called from the thread."""
        self._group, self._connect = group, connect
        self._store: Store | None = None
        self._thread: threading.Thread | None = None
        self._is_active, self._is_closed = False, threading.Event()
        self._latest: Work | None = None
        self._displayed: Work | None = None
        self._announced = ExitStack()

    def look(self) -> None:
        """Show the group's latest work, without waiting. After an error the store is not read again."""
        self._is_active = True
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"progress of {self._group}", daemon=True)
            self._thread.start()
        self._show(self._latest)

    def _run(self) -> None:
        try:
            while not self._is_closed.is_set():
                if self._is_active:
                    self._store = self._store or self._connect()
                    work = self._read(self._store) if self._store is not None else None
                    self._latest = work if self._is_active else None
                self._is_closed.wait(_INTERVAL_S)
        except Exception:  # the call reports the failure
            self._latest = None

    def _read(self, store: Store) -> Work | None:
        return _decoded(store.get(KEY), self._group) if store.check([KEY]) else None

    def _show(self, work: Work | None) -> None:
        old = self._displayed
        if old is not None and work is not None and (old.name, old.total) == (work.name, work.total):
            old.done, old.started = work.done, work.started
            return
        self._hide()
        if work is not None:
            self._announced.enter_context(announced(work))
            self._displayed = work

    def _hide(self) -> None:
        self._announced.close()
        self._displayed = None

    def clear(self) -> None:
        """Hide the work, and stop reading until the next look."""
        self._is_active, self._latest = False, None
        self._hide()

    def close(self) -> None:
        """Tell the thread to end, without waiting for it: the store may never answer."""
        self._is_closed.set()
        self.clear()


def encoded(work: Work | None) -> str:
    """Encode the work as JSON."""
    return json.dumps(work and [work.name, work.total, work.unit, work.look(), round(work.elapsed_s, 1)])


def _decoded(text: bytes, group: str) -> Work | None:
    """Decode the JSON of `encoded`; put the group's name before the work's."""
    fields = json.loads(text)
    if fields is None:
        return None
    name, total, unit, done, elapsed_s = fields
    return Work(f"{group}: {name}", total, unit, done, started=time.monotonic() - elapsed_s)
