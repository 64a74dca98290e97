"""metrics.jsonl: one JSON object per step."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TextIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from nemo_opd.disk import storage_errors
from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically
from nemo_opd.logging.base import ClosingTable, Logger, RunSummary
from nemo_opd.problems import first_problem

_T = TypeVar("_T")

_VALUES = TypeAdapter(dict[str, float | None])


def read(path: Path) -> list[dict[str, float]]:
    """Return the records of metrics.jsonl in the order written, null as NaN, without a torn last line.

    Raises DataError for any other invalid line.
    """
    return parse_lines(path, path.read_bytes().splitlines(), _record, "not a metrics record")


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


def _line(step: int, values: Mapping[str, float]) -> str:
    record = {"step": step, **{name: _json_number(value) for name, value in values.items() if name != "step"}}
    return json.dumps(record, allow_nan=False) + "\n"


def _json_number(value: float) -> float | None:
    """Return the number, or None for NaN and infinity, which JSON lacks."""
    if isinstance(value, int):
        return value
    number = float(value)
    return number if math.isfinite(number) else None


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
            self._file = self.path.open("a", encoding="utf-8")

    def _truncate_after(self, step: int) -> None:
        """Drop records after `step` (all if it is 0, as step 0 is validated again) and a torn last line."""
        if not self.path.exists():
            return
        records = [record for record in read(self.path) if step and record["step"] <= step]
        content = "".join(_line(int(record["step"]), record) for record in records)
        write_atomically(self.path, content.encode())

    def log(self, step: int, values: Mapping[str, float]) -> None:
        assert self._file is not None, "log before start"
        with storage_errors(self.path):
            self._file.write(_line(step, values))
            self._file.flush()

    def summary(self, closing: ClosingTable) -> None:
        """Write nothing: metrics.jsonl holds steps only."""

    def close(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with storage_errors(self.path):
                file.close()
