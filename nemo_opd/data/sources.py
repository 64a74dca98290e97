"""Documents from files or the hub, as a memory-mapped Hugging Face dataset.

Nothing is written beside the user's files: Arrow streams are mapped where they are, and every other format is converted
once into the cache of `datasets` (`$HF_DATASETS_CACHE`).
"""

import glob
import json
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from nemo_opd.config.data import HubDataset, Source, ValidationSource
from nemo_opd.data.documents import TEXT
from nemo_opd.data.files import resolve_files
from nemo_opd.errors import DataError

_ARROW_FILE_MAGIC = b"ARROW1"
_ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"
_PLAIN_JSON = frozenset({".jsonl", ".json", ".ndjson"})

_log = logging.getLogger(__name__)


def load_documents(source: Source, text_key: str, *, key: str) -> datasets.Dataset:
    """The documents of a source in one string column, `text`, in the order of the files and of their rows.

    `key` is where the source stands in the config (`data.train`). Raises DataError, naming the key and the value, for a
    source that is absent, missing, unreadable, without a text column named `text_key`, or without text.
    """
    if not source.given:
        choices = ", ".join(f"{key}.{kind}" for kind in Source.model_fields)
        raise DataError(f"{key} names no data; set one of {choices}")
    ((kind, value),) = ((kind, source.given[kind]) for kind in source.given)
    key = f"{key}.{kind}"
    if isinstance(value, HubDataset):
        documents = _read_hub(value, text_key, key)
        _require_text(documents, f"{key}.path={value.path!r}")
    else:
        documents = _READERS[kind](resolve_files(value, key=key), text_key, key)
        _require_text(documents, f"{key}={_shown(value)}")
    if isinstance(source, ValidationSource) and source.max_samples is not None:
        return documents.select(range(min(source.max_samples, len(documents))))
    return documents


def _read_arrow(paths: list[Path], text_key: str, key: str) -> datasets.Dataset:
    tables = [_read_arrow_file(path, text_key, key) for path in paths]
    types = {str(table.features[TEXT].dtype): path for table, path in zip(tables, paths, strict=True)}
    if len(types) > 1:
        differing = "; ".join(f"{dtype} in {path}" for dtype, path in types.items())
        raise DataError(
            f"{key}: column {text_key!r} has several types ({differing}); rewrite the files with one of them"
        )
    return datasets.concatenate_datasets(tables)


def _read_arrow_file(path: Path, text_key: str, key: str) -> datasets.Dataset:
    with _reading(key, path):
        if _is_ipc_file(path):
            dataset = _read_ipc_file(path)
        else:
            dataset = datasets.Dataset.from_file(str(path))
            _warn_without_end(path, key)
        dataset.data.table.validate()
    return _text_only(dataset, text_key, key, path)


def _read_ipc_file(path: Path) -> datasets.Dataset:
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        if not len(table):
            return datasets.Dataset(datasets.table.InMemoryTable(table))
    # Converted, because a process that a dataset is sent to can only map streams.
    return _convert("arrow", [path])


def _is_ipc_file(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_ARROW_FILE_MAGIC)) == _ARROW_FILE_MAGIC


def _warn_without_end(path: Path, key: str) -> None:
    """A stream may lack its end mark, but one whose writer was interrupted between two batches looks the same."""
    with path.open("rb") as file:
        file.seek(-len(_ARROW_END), os.SEEK_END)
        if file.read() != _ARROW_END:
            _log.warning("%s=%s: the Arrow stream has no end mark; was it written completely?", key, _shown(path))


def _read_parquet(paths: list[Path], text_key: str, key: str) -> datasets.Dataset:
    filled = []
    for path in paths:
        with _reading(key, path):
            metadata = pq.read_metadata(path)
        _require_text_column(metadata.schema.to_arrow_schema(), text_key, key, path)
        filled += [path] * (metadata.num_rows > 0)
    _require_rows(filled, key, paths)
    with _reading(key, *paths):
        dataset = _convert("parquet", filled, columns=[text_key])
    return _text_only(dataset, text_key, key, *paths)


def _read_jsonl(paths: list[Path], text_key: str, key: str) -> datasets.Dataset:
    filled = [path for path in paths if _has_lines(path, key)]
    _require_rows(filled, key, paths)
    try:
        with _reading(key, *paths):
            dataset = _convert("json", filled)
    except DataError as error:
        # The reader counts rows within its own blocks; users need the line of the file.
        _refuse_malformed_line(filled, key, error)
        raise
    return _text_only(dataset, text_key, key, *paths)


def _has_lines(path: Path, key: str) -> bool:
    with _reading(key, path), path.open("rb") as file:
        return any(line.strip() for line in file)


def _refuse_malformed_line(paths: list[Path], key: str, cause: DataError) -> None:
    for path in paths:
        if path.suffix not in _PLAIN_JSON:
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if reason := _malformation(line):
                    raise DataError(
                        f"{key}={_shown(path)}: line {number} is malformed: {reason};"
                        " write one JSON object a line, in UTF-8"
                    ) from cause


def _malformation(line: bytes) -> str | None:
    """Why a line is no JSON object; None for one that is, and for a blank one."""
    try:
        if not line.strip() or isinstance(json.loads(line), dict):
            return None
    except json.JSONDecodeError as error:
        return f"{error.msg} (column {error.colno})"
    except UnicodeDecodeError as error:
        return str(error)
    return "it is no JSON object"


def _read_text(paths: list[Path], text_key: str, key: str) -> datasets.Dataset:
    for path in paths:
        with _reading(key, path), path.open(encoding="utf-8") as file:
            for _ in file:
                pass
    with _reading(key, *paths):
        return _convert("text", paths, sample_by="document")


def _read_hub(hub: HubDataset, text_key: str, key: str) -> datasets.Dataset:
    way_out = f"check {key}.path, {key}.name and {key}.split, and the network"
    with _reading(f"{key}.path", hub.path, way_out=way_out):
        dataset = datasets.load_dataset(hub.path, hub.name, split=hub.split)
    return _text_only(dataset, text_key, f"{key}.path", hub.path)


_READERS: dict[str, Callable[[list[Path], str, str], datasets.Dataset]] = {
    "arrow_files": _read_arrow,
    "parquet_files": _read_parquet,
    "jsonl_files": _read_jsonl,
    "text_files": _read_text,
}


def _require_rows(filled: list[Path], key: str, paths: list[Path]) -> None:
    """`datasets` refuses to convert nothing."""
    if not filled:
        raise DataError(f"{key}={_shown(paths)}: no documents; the files have no rows")


def _convert(builder: str, paths: list[Path], **options: object) -> datasets.Dataset:
    # `datasets` takes paths for patterns; these are files.
    files = [glob.escape(str(path)) for path in paths]
    return datasets.load_dataset(builder, data_files=files, split="train", **options)


def _text_only(dataset: datasets.Dataset, text_key: str, key: str, *value: object) -> datasets.Dataset:
    _require_text_column(dataset.data.schema, text_key, key, *value)
    dataset = dataset.select_columns([text_key])
    return dataset if text_key == TEXT else dataset.rename_column(text_key, TEXT)


def _require_text_column(schema: pa.Schema, text_key: str, key: str, *value: object) -> None:
    where = f"{key}={_shown(value)}"
    if text_key not in schema.names:
        columns = ", ".join(schema.names) or "none"
        raise DataError(f"{where} has no column {text_key!r}; set data.text_key to one of its columns: {columns}")
    dtype = schema.field(text_key).type
    if not (pa.types.is_string(dtype) or pa.types.is_large_string(dtype)):
        raise DataError(
            f"{where}: column {text_key!r} is of type {dtype}, not string; set data.text_key to a column of strings"
        )


def _require_text(documents: datasets.Dataset, source: str) -> None:
    if not len(documents):
        raise DataError(f"{source}: no documents; the source has no rows")
    column = documents.data.column(TEXT)
    if column.null_count:
        first = pc.index(pc.is_null(column), True).as_py()
        raise DataError(
            f"{source}: {column.null_count} of {len(documents)} documents have no text (null), the first in row {first}"
            " (counted from 0 over all files); leave those rows out"
        )
    if not any(pc.any(pc.greater(pc.binary_length(chunk), 0)).as_py() for chunk in column.chunks):
        raise DataError(f"{source}: all {len(documents)} documents are empty; check data.text_key and the source")


@contextmanager
def _reading(key: str, *value: object, way_out: str = "check that it is complete and of this format") -> Iterator[None]:
    """Whatever a reader raises becomes a DataError: the libraries' errors share no base class."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise DataError(f"{key}={_shown(value)} cannot be read: {_root_cause(error)}; {way_out}") from error


def _root_cause(error: BaseException) -> str:
    while cause := error.__cause__ or error.__context__:
        error = cause
    return " ".join(f"{type(error).__name__}: {error}".split())


def _shown(value: object) -> str:
    """One value as it is, several as the first and a count."""
    if not isinstance(value, (list, tuple)):
        return repr(str(value))
    more = f" and {len(value) - 1} more" if len(value) > 1 else ""
    return f"{str(value[0])!r}{more}"
