"""All loggers of a run as one, and metrics.jsonl."""

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError
from rich.console import Console

from nemo_opd.config.run_fields import Logging
from nemo_opd.config.secrets import without_secrets
from nemo_opd.errors import DataError, OPDError, StorageError, first_problem
from nemo_opd.files import open_unlinked, read_data, storage_errors, write_atomically
from nemo_opd.logging.console import ConsoleLogger
from nemo_opd.logging.interface import ClosingTable, Logger, RunSummary
from nemo_opd.logging.terminal import VisibleConsole
from nemo_opd.logging.trackers import MlflowLogger, TensorBoardLogger, TrackioLogger, WandbLogger
from nemo_opd.types import Closing

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_VALUES = TypeAdapter(dict[str, float | None])


class Loggers(Closing, Logger):
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


def build(settings: Logging, output_dir: Path, *, console: Console | None = None) -> Loggers:
    """Return metrics.jsonl as the required logger and the loggers that `settings` enables as optional ones.

    Opens no file.
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
        optional.append(ConsoleLogger(settings.console, console or VisibleConsole()))
    return Loggers([JsonlLogger(output_dir / "metrics.jsonl")], optional)


class JsonlLogger(Logger):
    """Appends to metrics.jsonl and flushes each line to the kernel, so a SIGKILL loses at most the current one.

    Raises StorageError if the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: TextIO | None = None

    def start(self, run: RunSummary, step: int) -> None:
        with storage_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._truncate_after(step)
            self._file = open_unlinked(self.path, "a")

    def _truncate_after(self, step: int) -> None:
        """Drop records after `step` (all if it is 0, as step 0 is validated again) and a torn last line."""
        if not self.path.exists():
            return
        records = [record for record in read(self.path) if step and record["step"] <= step]
        content = "".join(json_line(int(record["step"]), record) for record in records)
        write_atomically(self.path, content.encode())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._file is not None, "log before start"
        with storage_errors(self.path):
            self._file.write(json_line(step, values))
            self._file.flush()

    def summary(self, closing: ClosingTable) -> None:
        """Write nothing: metrics.jsonl holds steps only."""

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with storage_errors(self.path):
                file.close()


def read(path: Path) -> list[dict[str, float]]:
    """Return the records of metrics.jsonl in the order written, null as NaN, without a torn last line; empty without a
    file.

    Raises DataError for any other invalid line.
    """
    return parse_lines(path, read_data(path).splitlines(), _record, "not a metrics record")


def parse_lines(path: Path, lines: Sequence[bytes], parse: Callable[[bytes], _T], problem: str) -> list[_T]:
    """Parse the lines of a JSON Lines file, ignoring a torn last line.

    Raises DataError with the path, the line number, `problem` and the reason if `parse` raises ValueError for another
    line.
    """
    parsed = []
    for number, line in enumerate(lines, start=1):
        try:
            parsed.append(parse(line))
        except ValueError as error:
            if number == len(lines):
                break
            reason = first_problem(error) if isinstance(error, ValidationError) else error
            raise DataError(f"{path}, line {number} is {problem} ({reason}); remove or repair it") from error
    return parsed


def _record(line: bytes) -> dict[str, float]:
    _VALUES.validate_json(line, strict=True)
    record = json.loads(line)  # keeps integers, which the adapter converts to floats
    step = record.get("step")
    if step is None or step < 0 or step % 1:  # rejects NaN and infinity too
        raise ValueError(f"step: it is {step}" if "step" in record else "no step")
    return {name: math.nan if value is None else value for name, value in record.items()}


def json_line(step: int, values: Mapping[str, float]) -> str:
    """Return a record as a line of metrics.jsonl."""
    record = {"step": step, **{name: _json_number(value) for name, value in values.items() if name != "step"}}
    return json.dumps(record, allow_nan=False) + "\n"


def _json_number(value: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON lacks."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None
