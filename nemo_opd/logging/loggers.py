"""All loggers of a run as one."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Self

from rich.console import Console

from nemo_opd.config.logging import Logging
from nemo_opd.config.secrets import without_secrets
from nemo_opd.errors import OPDError, StorageError
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary
from nemo_opd.logging.console import ConsoleLogger
from nemo_opd.logging.jsonl import JsonlLogger
from nemo_opd.logging.mlflow import MlflowLogger
from nemo_opd.logging.tensorboard import TensorBoardLogger
from nemo_opd.logging.trackio import TrackioLogger
from nemo_opd.logging.wandb import WandbLogger

_log = logging.getLogger(__name__)


def build(settings: Logging, output_dir: Path, *, console: Console | None = None) -> "Loggers":
    """Return metrics.jsonl as the required logger and the loggers that `settings` enables as optional ones.

    Opens no file. Raises ConfigError if wandb cannot log in.
    """
    optional: list[Logger] = []
    if settings.tensorboard.enabled:
        optional.append(TensorBoardLogger(output_dir))
    if settings.wandb.enabled:
        optional.append(WandbLogger(settings.wandb, output_dir))
    if settings.mlflow.enabled:
        optional.append(MlflowLogger(settings.mlflow, output_dir))
    if settings.trackio.enabled:
        optional.append(TrackioLogger(settings.trackio, output_dir))
    if settings.console.enabled:
        # Last, below the output of other loggers.
        optional.append(ConsoleLogger(settings.console, console or Console()))
    return Loggers([JsonlLogger(output_dir / "metrics.jsonl")], optional)


class Loggers(Logger):
    """Several loggers; leaving the `with` closes all of them, even if one raises.

    A failure of an optional logger, such as a closed pipe or a full disk, is reported as a warning and disables the
    logger, not the run: after that it is only closed. OPDErrors other than StorageError are raised, as they concern
    settings that can be corrected before the run.
    """

    def __init__(self, required: Sequence[Logger], optional: Sequence[Logger] = ()) -> None:
        self._required, self._optional = tuple(required), tuple(optional)
        self._failed: set[Logger] = set()

    def start(self, run: RunSummary, step: int = 0) -> None:
        self._call_each(lambda logger: logger.start(run, step))

    def phase(self, name: str) -> None:
        self._call_each(lambda logger: logger.phase(without_secrets(name)))

    def end_display(self) -> None:
        self._call_each(lambda logger: logger.end_display())

    def warn(self, message: str) -> None:
        self._call_each(lambda logger: logger.warn(without_secrets(message)))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._call_each(lambda logger: logger.log(step, values))

    def summary(self, closing: ClosingTable) -> None:
        self._call_each(lambda logger: logger.summary(closing))

    def close(self) -> None:
        with ExitStack() as stack:
            for logger in self._required:
                stack.callback(logger.close)
            for logger in self._optional:
                stack.callback(self._try, logger, lambda logger: logger.close())

    def _call_each(self, call: Callable[[Logger], None]) -> None:
        for logger in self._required:
            call(logger)
        for logger in self._optional:
            if logger not in self._failed:
                self._try(logger, call)

    def _try(self, logger: Logger, call: Callable[[Logger], None]) -> None:
        try:
            call(logger)
        # On a closed pipe, rich raises SystemExit without a message.
        except (Exception, SystemExit) as error:
            if isinstance(error, OPDError) and not isinstance(error, StorageError):
                raise
            self._report(logger, error)

    def _report(self, logger: Logger, error: BaseException) -> None:
        if logger in self._failed:
            return
        self._failed.add(logger)
        cause = error.__context__ if isinstance(error, SystemExit) and error.__context__ else error
        name = type(logger).__name__
        _log.warning("%s failed (%s: %s) and is switched off; the run goes on", name, type(cause).__name__, cause)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
