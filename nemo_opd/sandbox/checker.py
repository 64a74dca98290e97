"""A pool that judges many programs at once, and each program once."""

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

_CACHE_SIZE = 1 << 16
"""Number of cached verdicts."""
_TRIES = 3


class Checker:
    """A pool of workers that judge programs, with a cache of verdicts. The end of its `with` waits for running ones."""

    def __init__(self, settings: SandboxSettings, key: str) -> None:
        """Choose the isolation. key: the settings' key, for messages. Raises ConfigError if no sandbox works here."""
        self._settings = settings
        self._isolation = isolation_of(settings, key)
        self._verdicts: OrderedDict[bytes, Future[Verdict]] = OrderedDict()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(settings.workers or len(os.sched_getaffinity(0)), "sandbox")

    def submit(self, program: str, tests: Tests) -> Future[Verdict]:
        """Return the future verdict. Its `result` raises RolloutError if creating a sandbox failed three times."""
        key = hashlib.sha256(repr((program, tests)).encode(errors="surrogatepass")).digest()
        with self._lock:
            if key not in self._verdicts:
                self._verdicts[key] = self._pool.submit(self._judge, key, program, tests)
                if len(self._verdicts) > _CACHE_SIZE:
                    self._verdicts.popitem(last=False)
            self._verdicts.move_to_end(key)
            return self._verdicts[key]

    def _judge(self, key: bytes, program: str, tests: Tests) -> Verdict:
        for _ in range(_TRIES):
            try:
                return judge(self._isolation, self._settings, program, tests)
            except SandboxError as error:
                problem = error
        with self._lock:  # the machine may recover
            self._verdicts.pop(key, None)
        raise RolloutError(
            f"a sandbox for a program could not be created any more: {problem}; check whether the machine has memory "
            "and processes left"
        )

    def close(self) -> None:
        """Cancel programs that have not started, and wait for running ones, which end at their limits."""
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
