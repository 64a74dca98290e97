"""Work in progress: whoever works reports it here, and displays read it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

T = TypeVar("T")

BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
"""Environment variables that switch the progress bars of libraries off."""


@dataclass(eq=False, slots=True)
class Work:
    """A piece of work that takes a while."""

    name: str
    total: int | None = None
    """Units there are; None where nobody knows."""
    unit: str = ""
    """Plural, such as `texts`; `B` for bytes."""
    done: float = 0
    started: float = field(default_factory=time.monotonic)
    measure: Callable[[], float] | None = None
    """Asked for `done` where the work cannot count itself."""
    _lock: Lock = field(default_factory=Lock, repr=False)

    def advance(self, number: float = 1) -> None:
        """Count what is done; several threads may do parts of one work."""
        with self._lock:
            self.done += number

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def look(self) -> float:
        """Units that are done."""
        if self.measure is not None:
            self.done = self.measure()
        return self.done


_under_way: list[Work] = []


@contextmanager
def working(
    name: str, total: int | None = None, unit: str = "", *, measure: Callable[[], float] | None = None
) -> Iterator[Work]:
    """Inside, displays show this work, as far as it has advanced. Threads may work side by side."""
    work = Work(name, total, unit, measure=measure)
    with announced(work):
        yield work


@contextmanager
def announced(work: Work) -> Iterator[None]:
    under_way = _under_way
    under_way.append(work)
    try:
        yield
    finally:
        under_way.remove(work)


@contextmanager
def separately() -> Iterator[None]:
    """Inside, nothing is under way but what begins there: an exception that is kept keeps the work of its frames."""
    global _under_way
    outside, _under_way = _under_way, []
    try:
        yield
    finally:
        _under_way = outside


def tracked(items: Iterable[T], name: str, unit: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, and show how many have been dealt with. total: their number, where they do not know it."""
    with working(name, len(items) if total is None and isinstance(items, Sized) else total, unit) as work:
        for item in items:
            yield item
            work.advance()


def current() -> Work | None:
    """Return the newest work under way, one whose total is known before others; None where there is none."""
    newest_first = list(reversed(_under_way))
    return next((work for work in newest_first if work.total is not None), newest_first[0] if newest_first else None)


def quiet_libraries() -> None:
    """Switch off the progress bars and stack dumps of libraries that are imported afterwards, here and in processes
    started here, and the bars of a transformers that is already imported.

    A variable that the user has set stays.
    """
    for name in BARS:
        os.environ.setdefault(name, "1")
    if "transformers" in sys.modules and os.environ[BARS[0]] == "1":
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    # Below errors, such as those that it raises too: PyTorch prints a C++ stack when a connection is lost.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
