"""Loggers that a run can do without."""

import logging
from collections.abc import Callable, Mapping
from typing import ParamSpec

from nemo_opd.errors import OPDError, StorageError
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary

LOG = logging.getLogger(__name__)
P = ParamSpec("P")


class Tolerated(Logger):
    """A logger whose failure, such as a closed pipe or a full disk, ends its own output and not the run.

    The first failure is reported as a warning; the logger is not called again but for `close`.
    """

    def __init__(self, logger: Logger) -> None:
        self._logger = logger
        self._has_failed = False

    def start(self, run: RunSummary, step: int) -> None:
        """Raises the logger's own OPDErrors: settings that can be corrected before the run."""
        self._call(self._logger.start, run, step)

    def phase(self, name: str) -> None:
        self._call(self._logger.phase, name)

    def end_display(self) -> None:
        self._call(self._logger.end_display)

    def warn(self, message: str) -> None:
        self._call(self._logger.warn, message)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call(self._logger.log, step, values)

    def summary(self, closing: ClosingTable) -> None:
        self._call(self._logger.summary, closing)

    def close(self) -> None:
        try:
            self._logger.close()
        except (Exception, SystemExit) as error:
            self._report(error)

    def _call(self, method: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        if self._has_failed:
            return
        try:
            method(*args, **kwargs)
        except StorageError as error:
            self._report(error)
        except OPDError:
            raise
        # rich answers a closed pipe by SystemExit, with nothing else said.
        except (Exception, SystemExit) as error:
            self._report(error)

    def _report(self, error: BaseException) -> None:
        if self._has_failed:
            return
        self._has_failed = True
        cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
        name = type(self._logger).__name__
        LOG.warning("%s failed (%s: %s) and is switched off; the run goes on", name, type(cause).__name__, cause)
