"""Documents from JSONL files, plain or compressed."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pyarrow as pa

from nemo_opd.data.compressed import uncompressed
from nemo_opd.data.conversations import conversation_problem
from nemo_opd.data.convert import Read, convert, require_rows, selected
from nemo_opd.data.documents import MESSAGES, TEACHER, TEXT
from nemo_opd.data.layout import Layout
from nemo_opd.data.lines import BOM, malformation, numbered, unreadable
from nemo_opd.data.origin import of_lines
from nemo_opd.data.schema import reading, shown
from nemo_opd.errors import DataError


def read_jsonl(paths: list[Path], layout: Layout, key: str) -> Read:
    files = {path: file for path in paths if (file := _with_lines(path, key))}
    require_rows(list(files), key, paths)
    origin = of_lines(list(files), list(files.values()))
    way_out = "check that all files are complete, and have the same columns with values of the same types"
    try:
        with reading(key, *paths, way_out=way_out):
            check = partial(_refuse_line, files, key, unreadable)
            dataset = convert(
                "json", list(files.values()), list(layout.columns), f"{key}={shown(paths)}", origin, check
            )
    except DataError as error:
        # The reader counts rows within its own blocks; users need the line of the file.
        _refuse_line(files, key, malformation, error)
        _refuse_line(files, key, partial(_unsuitable, layout), error)
        raise
    if any(isinstance(field.type, pa.JsonType) for field in dataset.data.schema if field.name in layout.columns):
        # Its values are of several types, of which some may be none of the layout's.
        _refuse_line(files, key, partial(_unsuitable, layout))
    return selected(dataset, layout, key, *paths), origin


def _with_lines(path: Path, key: str) -> Path | None:
    """Return the file, unpacked where it is compressed; None where all its lines are blank."""
    with reading(key, path):
        file = uncompressed(path, f"{key}={shown(path)}")
        return file if any(line.strip() for _, line in numbered(file)) else None


def _refuse_line(
    files: dict[Path, Path], key: str, problem: Callable[[bytes], str | None], cause: DataError | None = None
) -> None:
    """Raise DataError for the first line with a problem."""
    for path, file in files.items():
        for number, line in numbered(file):
            if reason := problem(line):
                raise DataError(_malformed(path, key, number, reason)) from cause


def _malformed(path: Path, key: str, number: int, reason: str) -> str:
    return f"{key}={shown(path)}: line {number} is malformed: {reason}; write one JSON object a line, in UTF-8"


def _unsuitable(layout: Layout, line: bytes) -> str | None:
    """Return which value of a line is not what its column is for; None where all are, or are not there."""
    row = json.loads(line.removeprefix(BOM)) if line.strip() else {}
    for name, ours in layout.columns.items():
        value = row.get(name)
        if value is None:
            continue
        if ours == MESSAGES and (reason := conversation_problem(value)):
            return f"{name!r} is no conversation: {reason}"
        if ours in (TEXT, TEACHER) and not isinstance(value, str):
            return f"{name!r} is no string but {repr(value)[:60]}"
    return None
