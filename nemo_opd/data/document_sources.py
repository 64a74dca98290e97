"""Documents from files or the hub, as a memory-mapped Hugging Face dataset.

Nothing is written next to the user's files: Arrow streams are mapped in place, and every other format is converted once
into the cache of `datasets` (`$HF_DATASETS_CACHE`).
"""

import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Self

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from datasets.table import ConcatenationTable, MemoryMappedTable, Table
from huggingface_hub import HfApi

from nemo_opd.config.data import HubDataset, Source, ValidationSource
from nemo_opd.config.secrets import leaves
from nemo_opd.config.settings import require_lines
from nemo_opd.data.column_checks import require_columns, require_content
from nemo_opd.data.columns import Layout
from nemo_opd.data.conversations import require_conversations
from nemo_opd.data.dataset_files import (
    Read,
    columns_in,
    convert,
    first_damage,
    is_known,
    read_jsonl,
    require_intact,
    require_rows,
    retry_after_repair,
    selected,
)
from nemo_opd.data.lines import Origin, no_utf8, of_rows, of_source
from nemo_opd.data.row_types import OTHER, TEXT, Columns, holds_conversations, is_field
from nemo_opd.data.source_files import (
    arrow_schema,
    is_encoded,
    is_ipc_file,
    key_of_kind,
    plain,
    reading,
    require_source,
    resolve_files,
    summarize,
    writing,
)
from nemo_opd.errors import DataError
from nemo_opd.files import load_front_matter, load_yaml, read_file

_ARROW_END = b"\xff\xff\xff\xff\x00\x00\x00\x00"

_ROWS_AT_A_TIME = 1_000
"""Rows of a Parquet file in memory: a small file may hold one long text for each of many rows."""
_ANSWER_S = 10.0
"""Time for the hub to answer."""
_FileState = tuple[int, int, int]
"""Inode, bytes, and time of the last change in ns."""

_log = logging.getLogger(__name__)


def load_documents(source: Source, layout: Layout, *, key: str) -> datasets.Dataset:
    """Load the layout's columns, under our names, in the order of files and rows.

    key: the source's key in the settings, such as `data.train`. All rows are checked. Raises DataError, naming the key,
    the file and the row, for a source that is not set, missing, damaged, empty, or without the layout's columns.
    """
    require_source(source, key=key)
    ((kind, value),) = source.given.items()
    key = key_of_kind(key, kind)
    if isinstance(value, HubDataset):
        named = f"{key}.path={value.path!r}"
        documents = _read_hub(value, layout, key)
        origin: Origin = of_source
        require_intact(documents.data, named, origin)
    else:
        named = f"{key}={summarize(value)}"
        documents, origin = READERS[kind](resolve_files(value, key=key), layout, key)
    require_content(layout, documents, named, origin)
    if holds_conversations(documents.column_names):
        require_conversations(documents, named, origin)
    if isinstance(source, ValidationSource) and source.max_samples is not None:
        return documents.select(range(min(source.max_samples, len(documents))))
    return documents


def _read_arrow(paths: list[Path], layout: Layout, key: str) -> Read:
    tables = [_read_arrow_file(path, layout, key) for path in paths]
    for name, column in layout.columns.items():
        types = {str(table.data.schema.field(column).type): path for table, path in zip(tables, paths, strict=True)}
        if len(types) > 1:
            differing = "; ".join(f"{dtype} in {path}" for dtype, path in types.items())
            raise DataError(
                f"{key}: column {name!r} has several types ({differing}); rewrite the files with one of them"
            )
    layout_columns, other_schemas = set(layout.columns.values()), [table.data.schema for table in tables[1:]]
    shared = [
        field.name
        for field in tables[0].data.schema
        if field.name in layout_columns
        or all(field.name in schema.names and schema.field(field.name) == field for schema in other_schemas)
    ]
    joined = datasets.concatenate_datasets([table.select_columns(shared) for table in tables])
    return joined, of_rows(paths, [len(table) for table in tables])


def _read_arrow_file(path: Path, layout: Layout, key: str) -> datasets.Dataset:
    source = f"{key}={summarize(path)}"
    with reading(key, path):
        schema = arrow_schema(path)
    require_columns(layout, plain(schema), source)
    columns = list(layout.columns)
    with reading(key, path), pa.memory_map(str(path)) as file:
        is_file = is_ipc_file(path)
        table = (pa.ipc.open_file(file) if is_file else pa.ipc.open_stream(file)).read_all()
        table.validate()
        if not len(table):
            return selected(datasets.Dataset(datasets.table.InMemoryTable(table)), layout, key, path)
        if not is_file:
            _warn_without_end(path, key)
        origin = of_rows([path], [len(table)])
        # To run before anything reads it: an offset out of range would kill the process.
        check = partial(require_intact, table.select(columns), source, origin)
        unknown = [field.name for field in schema if field.name not in columns and not is_known(field)]
        if is_file or any(is_encoded(schema.field(name).type) for name in columns):
            if unknown:
                raise DataError(
                    f"{source}: columns {', '.join(map(repr, unknown))} have types that `datasets` cannot convert; "
                    "leave them out, or write the table in Arrow's stream format, with plain text"
                )
            # A process that receives a dataset can only map streams with types that `datasets` knows.
            text = plain(schema)
            fields = [text.field(field.name) if field.name in columns else field for field in schema]
            features = datasets.Features.from_arrow_schema(pa.schema(fields))
            dataset = convert("arrow", [path], columns, source, origin, check, features=features)
        else:
            check()
            mapped = datasets.table.MemoryMappedTable.from_file(str(path))
            dataset = datasets.Dataset(mapped.drop(unknown))
    return selected(dataset, layout, key, path)


def _warn_without_end(path: Path, key: str) -> None:
    """Warn about a stream without an end mark, which is optional, but which interrupted writers omit, too."""
    with path.open("rb") as file:
        file.seek(-len(_ARROW_END), os.SEEK_END)
        if file.read() != _ARROW_END:
            _log.warning("%s=%s: the Arrow stream has no end mark; was it written completely?", key, summarize(path))


def _read_parquet(paths: list[Path], layout: Layout, key: str) -> Read:
    counts, schemas = [], []
    for path in paths:
        with reading(key, path):
            metadata = pq.read_metadata(path)
            schemas.append(metadata.schema.to_arrow_schema())
        require_columns(layout, plain(schemas[-1]), f"{key}={summarize(path)}")
        counts.append(metadata.num_rows)
    filled = [path for path, count in zip(paths, counts, strict=True) if count]
    require_rows(filled, key, paths)
    source, origin = f"{key}={summarize(paths)}", of_rows(paths, counts)
    columns = columns_in(layout, [plain(schema) for schema in schemas])
    fields = [plain(schemas[0]).field(name) for name in schemas[0].names if name in columns]
    features = datasets.Features.from_arrow_schema(pa.schema(fields))
    options = {"columns": list(columns), "batch_size": _ROWS_AT_A_TIME, "features": features}
    with reading(key, *paths):
        dataset = convert("parquet", filled, list(layout.columns), source, origin, **options)
    return selected(dataset, layout, key, *paths), origin


def _read_text(paths: list[Path], layout: Layout, key: str) -> Read:
    for path in paths:
        with reading(key, path), path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if reason := no_utf8(line):
                    raise DataError(f"{key}={summarize(path)}: in line {number}, {reason}; convert the file to UTF-8")
    source, origin = f"{key}={summarize(paths)}", of_rows(paths, [1] * len(paths))
    with reading(key, *paths):
        return convert("text", paths, [TEXT], source, origin, sample_by="document"), origin


def _read_hub(hub: HubDataset, layout: Layout, key: str) -> datasets.Dataset:
    if Path(hub.path).is_dir():
        way_out = f"name the folder's files, as in {key.removesuffix('.hub')}={hub.path}/*.jsonl"
    else:
        way_out = f"check {key}.path, {key}.name, {key}.revision and {key}.split, and the network"
    revision = data_commit(hub.path, hub.revision) or hub.revision

    def read() -> datasets.Dataset:
        if (Path(hub.path) / "state.json").is_file():
            raise DataError(
                f"{key}.path={hub.path}: a data set of save_to_disk; name its files by {key.removesuffix('.hub')}."
                f"arrow_files={hub.path}/*.arrow"
            )
        if Path(hub.path).is_dir():
            _require_files_inside(Path(hub.path), key)
        builder = datasets.load_dataset_builder(hub.path, hub.name, revision=revision)
        _require_files_of_repository(builder, f"{key}.path={hub.path}")
        builder.download_and_prepare()
        return builder.as_dataset(split=hub.split)

    with reading(f"{key}.path", hub.path, way_out=way_out), writing(Path(datasets.config.HF_CACHE_HOME), "HF_HOME"):
        dataset = retry_after_repair(read, "*")
    return selected(dataset, layout, f"{key}.path", hub.path)


def _require_files_inside(folder: Path, key: str) -> None:
    """Raise DataError if the card of a folder names files of another place, which may be this user's secrets.

    `datasets` looks for them before it tells which they are. Links inside the folder are followed, as for files that
    are named one by one.
    """
    for card in (folder / "README.md", folder / ".huggingface.yaml"):
        if not card.exists():
            continue
        try:
            text = read_file(card, follow_link=True).decode()
            metadata = load_yaml(text) if card.suffix == ".yaml" else load_front_matter(text)
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DataError(f"{key}.path={folder}: {card.name} cannot be read ({error}); correct it") from error
        for keys, value in leaves(metadata.get("configs") if isinstance(metadata, dict) else None):
            outside = isinstance(value, str) and ("://" in value or value.startswith("/") or ".." in value.split("/"))
            if outside and {"data_files", "data_dir"} & set(keys):
                raise DataError(f"{key}.path={folder}: its card names {value}, outside of it; leave that out")


def _require_files_of_repository(builder: datasets.DatasetBuilder, value: str) -> None:
    """Raise DataError if the card of a data set on the hub names files of another place."""
    repository, at, _ = str(builder.base_path).partition("@")
    if not at:
        return
    for names in (builder.config.data_files or {}).values():
        for name in names:
            if not name.startswith(repository + at) or "/../" in name:
                raise DataError(f"{value}: its card names {name}, outside of it; leave that out")


@cache
def data_commit(path: str, revision: str | None) -> str | None:
    """Return the commit of a data set on the hub, the same in the whole process; None for a folder, or offline."""
    if Path(path).exists():
        return None
    try:
        return HfApi().dataset_info(path, revision=revision, timeout=_ANSWER_S).sha
    except Exception:  # of many types; loading the data set tells what is wrong
        return None


READERS: dict[str, Callable[[list[Path], Layout, str], Read]] = {
    "arrow_files": _read_arrow,
    "parquet_files": _read_parquet,
    "jsonl_files": read_jsonl,
    "text_files": _read_text,
}
require_lines(Source.model_fields, {*READERS, "hub"}, "READERS in nemo_opd/data/document_sources.py")


@dataclass
class MappedFiles:
    """Files of a dataset, with their states when it was loaded.

    A file that is deleted or replaced stays mapped as it was. A file changed in place is the dataset's new content and
    is checked again. A change between the check and the read goes unnoticed.
    """

    tables: list[MemoryMappedTable | None]
    """None for rows in memory."""
    stops: list[int]
    """End of each table's rows."""
    states: dict[str, _FileState] = field(default_factory=dict)

    @classmethod
    def of(cls, columns: Columns) -> Self:
        tables = _tables_of(columns)
        mapped = [table if isinstance(table, MemoryMappedTable) else None for table in tables]
        paths = {table.path for table in mapped if table is not None}
        states = {path: state for path in paths if (state := _state_of(path)) is not None}
        return cls(mapped, list(accumulate(table.num_rows for table in tables)), states)

    def check(self, rows: Iterable[int]) -> None:
        """Check the files of these rows. Raises DataError for one that was truncated or damaged."""
        if not self.states:
            return
        for i in sorted({bisect_right(self.stops, row) for row in rows}):
            table = self.tables[i]
            if table is not None and table.path in self.states:
                self._check(table)

    def _check(self, table: MemoryMappedTable) -> None:
        previous, now = self.states[table.path], _state_of(table.path)
        if now is None or now[0] != previous[0] or now == previous:
            return
        changed = f"{table.path} was changed while the run reads it"
        if now[1] < previous[1]:
            raise DataError(f"{changed}: it has {now[1]} bytes, and had {previous[1]}; restore it and resume the run")
        if damage := first_damage(table.table):
            raise DataError(f"{changed}, and is damaged now: {damage.reason}; restore it and resume the run")
        _log.warning("%s; its new content is used from here on", changed)
        self.states[table.path] = now


def _tables_of(columns: Columns) -> list[Table]:
    """Return the tables with a dataset's rows, in order; none if an index reorders the rows."""
    if not isinstance(columns, datasets.Dataset) or columns._indices is not None:
        return []
    data = columns.data
    return [row[0] for row in data.blocks] if isinstance(data, ConcatenationTable) else [data]


def _state_of(path: str) -> _FileState | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_ino, status.st_size, status.st_mtime_ns


def with_others(documents: datasets.Dataset, key: str) -> datasets.Dataset:
    """Add to each record the fields of the record half the dataset further on.

    key: the dataset's key in the settings. Raises DataError for a single record.
    """
    number = len(documents)
    if number < 2:
        raise DataError(
            f"{key} has {number} record, but contrast=true in a teacher's context needs another one; give more "
            "records, or set contrast=false"
        )
    names = [name for name in documents.column_names if is_field(name)]
    fields, middle = documents.select_columns(names), number // 2
    rotated = datasets.concatenate_datasets([fields.select(range(middle, number)), fields.select(range(middle))])
    rotated = rotated.rename_columns({name: OTHER + name for name in names})
    return datasets.concatenate_datasets([documents, rotated], axis=1)
