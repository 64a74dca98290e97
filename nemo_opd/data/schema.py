"""Columns of files, read from headers before any conversion and without PyTorch."""

import glob
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.parquet

from nemo_opd.config.data import HubDataset, Source
from nemo_opd.data.documents import MESSAGES, parsed
from nemo_opd.data.layout import Layout
from nemo_opd.data.lines import RowError, column_types, first_value, json_rows
from nemo_opd.demo import DEMO_PREFIX, corpus, is_demo, questions
from nemo_opd.demo.corpus import Split
from nemo_opd.errors import DataError, OPDError


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
    if not key.endswith("arrow_files"):
        raise DataError(f"{key}={entry!r}: the demo data are Arrow files; put {entry!r} under arrow_files")
    name = entry.removeprefix(DEMO_PREFIX)
    for prefix, files in (("", corpus), ("arithmetic_", questions)):
        for split in get_args(Split):
            if name == f"{prefix}{split}":
                return files.arrow_file(split)
    raise DataError(
        f"{key}={entry!r} is not demo data; use demo:train, demo:validation, demo:arithmetic_train or "
        "demo:arithmetic_validation"
    )


def _base_folder_note(path: Path) -> str:
    return "" if path.is_absolute() else f" (relative to {Path.cwd()})"


_ARROW_FILE_MAGIC = b"ARROW1"
_PLAIN_JSON = frozenset({".jsonl", ".json", ".ndjson"})
_FIRST_ROWS = 1000
"""Rows of a JSON file that its columns are inferred from."""


def require_suitable(source: Source, layout: Layout, *, key: str) -> None:
    """Check that the files exist, can be opened and have the layout's columns. The hub is not contacted.

    Accepts everything that `load_documents` accepts. Raises DataError, naming the key and the value.
    """
    require_source(source, key=key)
    for kind, value in source.given.items():
        if isinstance(value, HubDataset):
            continue
        named = f"{key}.{kind}"
        for path in resolve_files(value, key=named):
            with reading(named, path):
                schema = _SCHEMAS[kind](path) if kind in _SCHEMAS else None
            if schema is not None:
                layout.require_columns(plain(schema), f"{named}={summarize(path)}")
                _require_json(kind, path, layout, f"{named}={summarize(path)}")


def _require_json(kind: str, path: Path, layout: Layout, source: str) -> None:
    """Raise DataError if the first conversation is a string but not a JSON list, as in a column of texts."""
    for name, ours in layout.columns.items():
        value = first_value(kind, path, name) if ours == MESSAGES else None
        if not isinstance(value, str):
            continue
        with suppress(DataError):
            if isinstance(parsed(value), list):
                continue
        raise DataError(
            f"{source}: column {name!r} holds no conversations; its first row is {value[:60]!r}…, not a list of "
            "objects or its JSON text; set data.messages_key to such a column, or leave it out to read texts"
        )


def require_source(source: Source, *, key: str) -> None:
    """Raise DataError if the source names no data."""
    if not source.given:
        choices = ", ".join(f"{key}.{kind}" for kind in Source.model_fields)
        raise DataError(f"{key} names no data; set one of {choices}")


def arrow_schema(path: Path) -> pa.Schema:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).schema if is_ipc_file(path) else pa.ipc.open_stream(file).schema


def _parquet_schema(path: Path) -> pa.Schema:
    return pa.parquet.read_schema(path)


def json_schema(path: Path) -> pa.Schema | None:
    """Return the schema of an uncompressed file's first rows, or None if the file is empty or one of them is malformed.

    The loader reads all rows and reports malformed lines, and values that are not strings in a column of strings.
    """
    try:
        rows = (row for _, row in islice(json_rows(path), _FIRST_ROWS))
        types = column_types(rows, strings_among_others=pa.string())
    except RowError:
        return None
    return pa.schema(types.items()) if types else None


def _jsonl_schema(path: Path) -> pa.Schema | None:
    return json_schema(path) if path.suffix in _PLAIN_JSON else None


def _text_schema(path: Path) -> pa.Schema:
    with path.open("rb"):
        return pa.schema([("text", pa.string())])


_SCHEMAS: dict[str, Callable[[Path], pa.Schema | None]] = {
    "arrow_files": arrow_schema,
    "parquet_files": _parquet_schema,
    "jsonl_files": _jsonl_schema,
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


def is_encoded(dtype: pa.DataType) -> bool:
    return pa.types.is_dictionary(dtype) or pa.types.is_string_view(dtype)


def is_ipc_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC


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
