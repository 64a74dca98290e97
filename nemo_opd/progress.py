"""Current work: reported here by the code that works, and read by displays."""

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import TypeVar

_T = TypeVar("_T")

BARS = ("HF_HUB_DISABLE_PROGRESS_BARS", "HF_DATASETS_DISABLE_PROGRESS_BARS", "TQDM_DISABLE")
"""Environment variables that disable the progress bars of libraries."""


@dataclass(eq=False, slots=True)
class Work:
    """A task that takes a while."""

    name: str
    total: int | None = None
    """Number of units, or None if unknown."""
    unit: str = ""
    """Plural, such as `texts`; `B` for bytes."""
    done: float = 0
    started: float = field(default_factory=time.monotonic)
    measure: Callable[[], float] | None = None
    """Returns `done` for work that cannot count itself."""
    _lock: Lock = field(default_factory=Lock, repr=False)

    def advance(self, number: float = 1) -> None:
        """Count finished units; several threads may work on one task."""
        with self._lock:
            self.done += number

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started

    def look(self) -> float:
        """Return the finished units."""
        if self.measure is not None:
            self.done = self.measure()
        return self.done


_under_way: list[Work] = []


@contextmanager
def working(
    name: str, total: int | None = None, unit: str = "", *, measure: Callable[[], float] | None = None
) -> Iterator[Work]:
    """Announce work to displays during the block. Threads may announce work at the same time."""
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
    """Hide all outer work during the block, as a kept exception keeps its frames' work announced."""
    global _under_way
    outside, _under_way = _under_way, []
    try:
        yield
    finally:
        _under_way = outside


def tracked(items: Iterable[_T], name: str, unit: str, total: int | None = None) -> Iterator[_T]:
    """Yield the items, and show the progress through them. total: their number, if they have no length."""
    with working(name, len(items) if total is None and isinstance(items, Sized) else total, unit) as work:
        for item in items:
            yield item
            work.advance()


def current() -> Work | None:
    """Return the newest current work, preferring work with a known total; None while idle."""
    newest_first = list(reversed(_under_way))
    return next((work for work in newest_first if work.total is not None), newest_first[0] if newest_first else None)


def quiet_libraries() -> None:
    """Disable progress bars and stack dumps of libraries that are imported later, here and in child processes, and the
    bars of an already imported transformers.

    Variables set by the user are kept.
    """
    for name in BARS:
        os.environ.setdefault(name, "1")
    if "transformers" in sys.modules and os.environ[BARS[0]] == "1":
        sys.modules["transformers"].utils.logging.disable_progress_bar()
    # Each of the hub's many retries is a warning; what remains of them is an error.
    os.environ.setdefault("HF_HUB_VERBOSITY", "error")
    # PyTorch logs a C++ stack when a connection is lost, besides raising the error.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
