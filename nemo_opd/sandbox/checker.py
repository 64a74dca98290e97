"""Many programs at once, each judged once."""

import hashlib
import os
import threading
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Self

from nemo_opd.config.sandbox import SandboxSettings
from nemo_opd.errors import RolloutError
from nemo_opd.sandbox.isolation import isolation_of
from nemo_opd.sandbox.process import SandboxError
from nemo_opd.sandbox.tests import Tests
from nemo_opd.sandbox.verdict import Verdict, judge

_MOST_KEPT = 1 << 16
"""Verdicts that are kept."""
_TRIES = 3


class Checker:
    """Judges programs, as many at a time as there are workers; equal ones once. Leaving the `with` ends what runs."""

    def __init__(self, settings: SandboxSettings, key: str) -> None:
        """Choose the isolation. key: of the settings. Raises ConfigError where no sandbox can be made."""
        self._settings = settings
        self._isolation = isolation_of(settings, key)
        self._known: OrderedDict[bytes, Future[Verdict]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(settings.workers or len(os.sched_getaffinity(0)), "sandbox")

    def submit(self, program: str, tests: Tests) -> Future[Verdict]:
        """Return the verdict to come. Its `result` raises RolloutError where a sandbox could not be made, thrice."""
        key = hashlib.sha256(repr((program, tests)).encode(errors="surrogatepass")).digest()
        with self._lock:
            if key not in self._known:
                self._known[key] = self._pool.submit(self._judge, key, program, tests)
                if len(self._known) > _MOST_KEPT:
                    self._known.popitem(last=False)
            self._known.move_to_end(key)
            return self._known[key]

    def _judge(self, key: bytes, program: str, tests: Tests) -> Verdict:
        for _ in range(_TRIES):
            try:
                return judge(self._isolation, self._settings, program, tests)
            except SandboxError as error:
                problem = error
        with self._lock:  # the machine may recover
            self._known.pop(key, None)
        raise RolloutError(
            f"a sandbox for a program could not be made any more: {problem}; see whether the machine has memory and "
            "processes left"
        )

    def close(self) -> None:
        """Give up what has not begun, and wait for what runs, which its limits end."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
