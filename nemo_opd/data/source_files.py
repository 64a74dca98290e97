"""Files of a source: their paths and columns, and errors of reading and writing them.

Columns are read from headers or first rows, before any conversion and without PyTorch.
"""

import errno
import fcntl
import glob
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet

from nemo_opd.config.data import HubDataset, Source
from nemo_opd.data.column_checks import require_columns
from nemo_opd.data.columns import Layout
from nemo_opd.data.lines import RowError, column_types, json_rows
from nemo_opd.demo import DEMO_PREFIX, arithmetic_questions, is_demo, python_sources
from nemo_opd.demo.python_sources import Split
from nemo_opd.errors import DataError, OPDError, StorageError
from nemo_opd.files import FULL, error_number, refusal

_ARROW_FILE_MAGIC = b"ARROW1"
_FIRST_ROWS = 1000
"""Rows of a JSON file that its columns are inferred from."""

_WRITE_ERRORS = FULL | {errno.EROFS, errno.EFBIG}
"""errno values that only writing raises: libraries read the user's files in the same call."""
WAIT_S = 2 * 3600.0
"""Seconds to wait for another process: long enough to convert 1.4 TB at 0.2 GB/s."""
_POLL_S = 0.5
_log = logging.getLogger(__name__)


def require_suitable(source: Source, layout: Layout, *, key: str) -> None:
    """Check that the files exist, can be opened and have the layout's columns. The hub is not contacted.

    Accepts everything that `load_documents` accepts. Raises DataError, naming the key and the value.
    """
    has_rows = "jsonl_files" not in source.given
    for i, (name, schema) in enumerate(_schemas(source, key)):
        if schema is not None:
            has_rows = True
            require_columns(layout, schema, name, is_first=i == 0 and key != "data.validation")
    if not has_rows:
        raise DataError(f"{name}: no documents; the files have no rows")


def first_schema(source: Source, *, key: str) -> tuple[str, pa.Schema | None]:
    """Return the name of a source's first file in messages, and its columns; None if only the loader can tell them.

    Raises DataError for a source that is not set, or a file that cannot be read.
    """
    return next(_schemas(source, key))


def _schemas(source: Source, key: str) -> Iterator[tuple[str, pa.Schema | None]]:
    """Yield the name of each file in messages, and its columns; None if only the loader can tell them."""
    require_source(source, key=key)
    ((kind, value),) = source.given.items()
    named = key_of_kind(key, kind)
    if isinstance(value, HubDataset):
        yield named, None
        return
    for path in resolve_files(value, key=named):
        name = f"{named}={summarize(path)}"
        with reading(named, path):
            try:
                schema = _SCHEMAS[kind](path) if kind in _SCHEMAS else None
            except RowError as error:
                raise DataError(f"{named}={error}") from error
        yield name, None if schema is None else plain(schema)


def key_of_kind(key: str, kind: str) -> str:
    """Return the key of a source's files of one kind; an option of a command takes all kinds."""
    return key if key.startswith("--") else f"{key}.{kind}"


def require_source(source: Source, *, key: str) -> None:
    """Raise DataError if the source names no data."""
    if not source.given:
        choices = ", ".join(f"{key}.{kind}" for kind in Source.model_fields)
        raise DataError(f"{key} names no data; set one of {choices}")


def resolve_files(entries: Iterable[str], *, key: str) -> list[Path]:
    """Resolve paths, globs (`**` is recursive, matches are sorted) and demo references to files, in the given order.

    Raises DataError, naming `key` and the entry, for a missing path, a glob without matches, or a folder.
    """
    return [path for entry in entries for path in _resolve(entry, key)]


def _resolve(entry: str, key: str) -> list[Path]:
    if is_demo(entry):
        return [_demo_file(entry, key)]
    path = Path(entry).expanduser()
    if path.is_file():
        return [path.absolute()]
    if path.is_dir():
        raise DataError(f"{key}={entry!r} is a folder; name its files, for example {str(path / '*')!r}")
    if not glob.has_magic(entry):
        raise DataError(f"{key}={entry!r} does not exist{_base_folder_note(path)}; correct the path")
    matches = sorted(match for name in glob.glob(str(path), recursive=True) if (match := Path(name)).is_file())
    if not matches:
        raise DataError(
            f"{key}={entry!r} matches no file{_base_folder_note(path)}; correct the pattern (`**` goes into subfolders)"
        )
    return [match.absolute() for match in matches]


def _demo_file(entry: str, key: str) -> Path:
    if not (key.startswith("--") or key.endswith("arrow_files")):
        raise DataError(f"{key}={entry!r}: the demo data are Arrow files; put {entry!r} under arrow_files")
    name = entry.removeprefix(DEMO_PREFIX)
    for prefix, files in (("", python_sources), ("arithmetic_", arithmetic_questions)):
        for split in get_args(Split):
            if name == f"{prefix}{split}":
                return files.arrow_file(split)
    raise DataError(
        f"{key}={entry!r} is not demo data; use demo:train, demo:validation, demo:arithmetic_train or "
        "demo:arithmetic_validation"
    )


def _base_folder_note(path: Path) -> str:
    return "" if path.is_absolute() else f" (relative to {Path.cwd()})"


def arrow_schema(path: Path) -> pa.Schema:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).schema if is_ipc_file(path) else pa.ipc.open_stream(file).schema


def json_schema(path: Path) -> pa.Schema | None:
    """Return the schema of a file's first rows, or None if the file has no rows.

    The loader reports later malformed lines, and values that are not strings in a column of strings. Raises RowError.
    """
    rows = [row for _, row in islice(json_rows(path), _FIRST_ROWS)]
    return pa.schema(column_types(rows, strings_among_others=pa.string()).items()) if rows else None


def _text_schema(path: Path) -> pa.Schema:
    with path.open("rb"):
        return pa.schema([("text", pa.string())])


_SCHEMAS: dict[str, Callable[[Path], pa.Schema | None]] = {
    "arrow_files": arrow_schema,
    "parquet_files": pa.parquet.read_schema,
    "jsonl_files": json_schema,
    "text_files": _text_schema,
}
"""Functions that read a file's columns, keyed by format. For a file without a function, or if it returns None, only the
loader can tell.
"""


def plain(schema: pa.Schema) -> pa.Schema:
    """Return the schema with text in place of text encodings and of null, as the loader reads it."""

    def plain_type(dtype: pa.DataType) -> pa.DataType:
        if is_encoded(dtype):
            return dtype.value_type if pa.types.is_dictionary(dtype) else pa.string()
        return pa.string() if pa.types.is_null(dtype) else dtype

    return pa.schema([(field.name, plain_type(field.type)) for field in schema])


def is_ipc_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC


def is_encoded(dtype: pa.DataType) -> bool:
    return pa.types.is_dictionary(dtype) or pa.types.is_string_view(dtype)


@contextmanager
def reading(key: str, *value: object, way_out: str = "check that it is complete and of this format") -> Iterator[None]:
    """Turn any error that a reader raises inside into a DataError: the libraries' errors share no base class."""
    try:
        yield
    except OPDError:
        raise
    except Exception as error:
        causes = list(_causes(error))
        if (raised := next((cause for cause in causes if isinstance(cause, OPDError)), None)) is not None:
            raise raised from None  # `datasets` wraps errors of builders
        described = " ".join(f"{type(causes[-1]).__name__}: {causes[-1]}".split())
        raise DataError(f"{key}={summarize(value)} cannot be read: {described}; {way_out}") from error


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes, the original cause last."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def summarize(value: object) -> str:
    """Format one value in quotes, several as the first and a count."""
    if not isinstance(value, (list, tuple)):
        return repr(str(value))
    more = f" and {len(value) - 1} more" if len(value) > 1 else ""
    return f"{str(value[0])!r}{more}"


@contextmanager
def writing(folder: Path, variable: str) -> Iterator[None]:
    """Raise a one-line StorageError if writing below `folder` fails inside; pass other errors on.

    variable: environment variable that names the folder.
    """
    try:
        yield
    except OPDError:
        raise
    except Exception as error:
        number, name = error_number(error), getattr(error, "filename", None)
        is_below = isinstance(name, str) and Path(name).absolute().is_relative_to(folder.absolute())
        if number is None or not (number in _WRITE_ERRORS or is_below):
            raise
        raise StorageError(refusal(folder, number, instead=elsewhere(variable))) from error


def elsewhere(variable: str) -> str:
    return f"set ${variable} to another folder"


def await_turn(lock: Path, variable: str) -> None:
    """Wait while another process holds the file's lock; libraries wait silently and without end.

    variable: environment variable that names the folder. Raises StorageError after WAIT_S.
    """
    deadline = time.monotonic() + WAIT_S
    if _is_held(lock):
        _log.warning("waiting for another process that converts the same data; it holds %s", lock)
    while _is_held(lock):
        if time.monotonic() > deadline:
            raise StorageError(
                f"another process has held {lock} for more than {WAIT_S:.0f} s; see whether it still works, end it, or "
                f"{elsewhere(variable)}"
            )
        time.sleep(_POLL_S)


def _is_held(lock: Path) -> bool:
    """Return whether another process has locked the file; False if the file system has no locks."""
    try:
        with lock.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
