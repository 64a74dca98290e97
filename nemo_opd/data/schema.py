"""Columns of files from their headers, before anything is converted and without PyTorch."""

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.json
import pyarrow.parquet

from nemo_opd.config.data import HubDataset, Source
from nemo_opd.data.documents import MESSAGES, parsed
from nemo_opd.data.files import resolve_files
from nemo_opd.data.first_row import first_value
from nemo_opd.data.layout import Layout
from nemo_opd.data.lines import unreadable
from nemo_opd.errors import DataError, OPDError

_ARROW_FILE_MAGIC = b"ARROW1"
_PLAIN_JSON = frozenset({".jsonl", ".json", ".ndjson"})
_JSON_BLOCK = 10 << 20
"""Bytes from whose rows the columns are taken, as `datasets` does."""


def require_suitable(source: Source, layout: Layout, *, key: str) -> None:
    """Check that the files exist, can be opened and have the layout's columns; the hub is not asked.

    Refuses nothing that `load_documents` takes. Raises DataError, naming the key and the value.
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
                layout.require_columns(plain(schema), f"{named}={shown(path)}")
                _require_json(kind, path, layout, f"{named}={shown(path)}")


def _require_json(kind: str, path: Path, layout: Layout, source: str) -> None:
    """Raise DataError where the first conversation is a string that is no JSON list, as a column of texts is."""
    for name, ours in layout.columns.items():
        value = first_value(kind, path, name) if ours == MESSAGES else None
        if not isinstance(value, str):
            continue
        with suppress(DataError):
            if isinstance(parsed(value), list):
                continue
        raise DataError(
            f"{source}: column {name!r} holds no conversations; its first row is {value[:60]!r}…, neither a list of "
            "objects nor that as JSON; set data.messages_key to such a column, or leave it out to read texts"
        )


def require_source(source: Source, *, key: str) -> None:
    """Raise DataError where the source names nothing."""
    if not source.given:
        choices = ", ".join(f"{key}.{kind}" for kind in Source.model_fields)
        raise DataError(f"{key} names no data; set one of {choices}")


def arrow_schema(path: Path) -> pa.Schema:
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_file(file).schema if is_ipc_file(path) else pa.ipc.open_stream(file).schema


def _parquet_schema(path: Path) -> pa.Schema:
    return pa.parquet.read_schema(path)


def _json_schema(path: Path) -> pa.Schema | None:
    """Return the schema of the first rows; None where they have none.

    The loader, which reads all rows, names a malformed line.
    """
    if path.suffix not in _PLAIN_JSON:
        return None
    with path.open("rb") as file:
        block = file.read(_JSON_BLOCK)
        has_more = bool(file.read(1))
    if has_more:
        block = block[: block.rfind(b"\n") + 1]
    if not block.strip() or any(map(unreadable, block.splitlines())):
        return None
    try:
        options = pa.json.ReadOptions(block_size=len(block) + 1)
        return pa.json.read_json(io.BytesIO(block), read_options=options).schema
    except pa.ArrowInvalid:
        return None


def _text_schema(path: Path) -> pa.Schema:
    with path.open("rb"):
        return pa.schema([("text", pa.string())])


_SCHEMAS: dict[str, Callable[[Path], pa.Schema | None]] = {
    "arrow_files": arrow_schema,
    "parquet_files": _parquet_schema,
    "jsonl_files": _json_schema,
    "text_files": _text_schema,
}
"""Function to the columns of a file; None where the loader alone can tell, as of formats that are not here."""


def plain(schema: pa.Schema) -> pa.Schema:
    """Return the schema with text in place of its encodings, as the loader reads it, and of null."""

    def of(dtype: pa.DataType) -> pa.DataType:
        if is_encoded(dtype):
            return dtype.value_type if pa.types.is_dictionary(dtype) else pa.string()
        return pa.string() if pa.types.is_null(dtype) else dtype

    return pa.schema([(field.name, of(field.type)) for field in schema])


def is_encoded(dtype: pa.DataType) -> bool:
    return pa.types.is_dictionary(dtype) or pa.types.is_string_view(dtype)


def is_ipc_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC


@contextmanager
def reading(key: str, *value: object, way_out: str = "check that it is complete and of this format") -> Iterator[None]:
    """Turn whatever a reader raises inside into a DataError: the libraries' errors share no base class."""
    try:
        yield
    except OPDError:
        raise
    except Exception as error:
        raise DataError(f"{key}={shown(value)} cannot be read: {_root_cause(error)}; {way_out}") from error


def _root_cause(error: BaseException) -> str:
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(f"{type(error).__name__}: {error}".split())


def shown(value: object) -> str:
    """Format one value as it is, several as the first and a count."""
    if not isinstance(value, (list, tuple)):
        return repr(str(value))
    more = f" and {len(value) - 1} more" if len(value) > 1 else ""
    return f"{str(value[0])!r}{more}"
