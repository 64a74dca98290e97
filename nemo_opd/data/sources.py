"""Documents from files or the hub, as a memory-mapped Hugging Face dataset.

Nothing is written beside the user's files: Arrow streams are mapped where they are, and every other format is converted
once into the cache of `datasets` (`$HF_DATASETS_CACHE`).
"""

import glob
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from nemo_opd.config.data import HubDataset, Source, ValidationSource
from nemo_opd.data.files import resolve_files
from nemo_opd.data.layout import Layout
from nemo_opd.data.schema import PLAIN_JSON, is_ipc_file, reading, require_source, shown
from nemo_opd.errors import DataError

_ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_log = logging.getLogger(__name__)


def load_documents(source: Source, layout: Layout, *, key: str) -> datasets.Dataset:
    """The columns of the layout, under our names, in the order of the files and of their rows.

    `key` is where the source stands in the config (`data.train`). Raises DataError, naming the key and the value, for a
    source that is absent, missing, unreadable, without the layout's columns, or without content.
    """
    require_source(source, key=key)
    ((kind, value),) = ((kind, source.given[kind]) for kind in source.given)
    key = f"{key}.{kind}"
    if isinstance(value, HubDataset):
        documents = _read_hub(value, layout, key)
        layout.require_content(documents, f"{key}.path={value.path!r}")
    else:
        documents = _READERS[kind](resolve_files(value, key=key), layout, key)
        layout.require_content(documents, f"{key}={shown(value)}")
    if isinstance(source, ValidationSource) and source.max_samples is not None:
        return documents.select(range(min(source.max_samples, len(documents))))
    return documents


def _read_arrow(paths: list[Path], layout: Layout, key: str) -> datasets.Dataset:
    tables = [_read_arrow_file(path, layout, key) for path in paths]
    for name, column in layout.columns.items():
        types = {str(table.data.schema.field(column).type): path for table, path in zip(tables, paths, strict=True)}
        if len(types) > 1:
            differing = "; ".join(f"{dtype} in {path}" for dtype, path in types.items())
            raise DataError(
                f"{key}: column {name!r} has several types ({differing}); rewrite the files with one of them"
            )
    return datasets.concatenate_datasets(tables)


def _read_arrow_file(path: Path, layout: Layout, key: str) -> datasets.Dataset:
    with reading(key, path):
        if is_ipc_file(path):
            dataset = _read_ipc_file(path)
        else:
            dataset = datasets.Dataset.from_file(str(path))
            _warn_without_end(path, key)
        dataset.data.table.validate()
    return _selected(dataset, layout, key, path)


def _read_ipc_file(path: Path) -> datasets.Dataset:
    with pa.memory_map(str(path)) as source:
        table = pa.ipc.open_file(source).read_all()
        if not len(table):
            return datasets.Dataset(datasets.table.InMemoryTable(table))
    # Converted, because a process that a dataset is sent to can only map streams.
    return _convert("arrow", [path])


def _warn_without_end(path: Path, key: str) -> None:
    """A stream may lack its end mark, but one whose writer was interrupted between two batches looks the same."""
    with path.open("rb") as file:
        file.seek(-len(_ARROW_END), os.SEEK_END)
        if file.read() != _ARROW_END:
            _log.warning("%s=%s: the Arrow stream has no end mark; was it written completely?", key, shown(path))


def _read_parquet(paths: list[Path], layout: Layout, key: str) -> datasets.Dataset:
    filled = []
    for path in paths:
        with reading(key, path):
            metadata = pq.read_metadata(path)
        layout.require_columns(metadata.schema.to_arrow_schema(), f"{key}={shown(path)}")
        filled += [path] * (metadata.num_rows > 0)
    _require_rows(filled, key, paths)
    with reading(key, *paths):
        dataset = _convert("parquet", filled, columns=list(layout.columns))
    return _selected(dataset, layout, key, *paths)


def _read_jsonl(paths: list[Path], layout: Layout, key: str) -> datasets.Dataset:
    filled = [path for path in paths if _has_lines(path, key)]
    _require_rows(filled, key, paths)
    try:
        with reading(key, *paths):
            dataset = _convert("json", filled)
    except DataError as error:
        # The reader counts rows within its own blocks; users need the line of the file.
        _refuse_malformed_line(filled, key, error)
        raise
    return _selected(dataset, layout, key, *paths)


def _has_lines(path: Path, key: str) -> bool:
    with reading(key, path), path.open("rb") as file:
        return any(line.strip() for line in file)


def _refuse_malformed_line(paths: list[Path], key: str, cause: DataError) -> None:
    for path in paths:
        if path.suffix not in PLAIN_JSON:
            continue
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if reason := _malformation(line):
                    raise DataError(
                        f"{key}={shown(path)}: line {number} is malformed: {reason};"
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


def _read_text(paths: list[Path], layout: Layout, key: str) -> datasets.Dataset:
    for path in paths:
        with reading(key, path), path.open(encoding="utf-8") as file:
            for _ in file:
                pass
    with reading(key, *paths):
        return _convert("text", paths, sample_by="document")


def _read_hub(hub: HubDataset, layout: Layout, key: str) -> datasets.Dataset:
    way_out = f"check {key}.path, {key}.name and {key}.split, and the network"
    with reading(f"{key}.path", hub.path, way_out=way_out):
        dataset = datasets.load_dataset(hub.path, hub.name, split=hub.split)
    return _selected(dataset, layout, f"{key}.path", hub.path)


_READERS: dict[str, Callable[[list[Path], Layout, str], datasets.Dataset]] = {
    "arrow_files": _read_arrow,
    "parquet_files": _read_parquet,
    "jsonl_files": _read_jsonl,
    "text_files": _read_text,
}


def _require_rows(filled: list[Path], key: str, paths: list[Path]) -> None:
    """`datasets` refuses to convert nothing."""
    if not filled:
        raise DataError(f"{key}={shown(paths)}: no documents; the files have no rows")


def _convert(builder: str, paths: list[Path], **options: object) -> datasets.Dataset:
    # `datasets` takes paths for patterns; these are files.
    files = [glob.escape(str(path)) for path in paths]
    return datasets.load_dataset(builder, data_files=files, split="train", **options)


def _selected(dataset: datasets.Dataset, layout: Layout, key: str, *value: object) -> datasets.Dataset:
    layout.require_columns(dataset.data.schema, f"{key}={shown(value)}")
    renamed = {name: column for name, column in layout.columns.items() if name != column}
    return dataset.select_columns(list(layout.columns)).rename_columns(renamed)
