"""Conversion of files to datasets, in the cache of `datasets` (`$HF_DATASETS_CACHE`), and checks for damage."""

import glob
import json
import logging
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import datasets
import pyarrow as pa

from nemo_opd.data.column_checks import require_columns
from nemo_opd.data.columns import Layout
from nemo_opd.data.lines import Origin, RowError, column_types, json_rows, of_lines
from nemo_opd.data.row_types import MESSAGES, RESPONSE, ROW, TEACHER, TEXT, TOOLS, answer_text
from nemo_opd.data.source_files import await_turn, elsewhere, json_schema, plain, reading, summarize, writing
from nemo_opd.errors import DataError
from nemo_opd.files import require_room

_STRING_COLUMNS = (TEXT, TEACHER, RESPONSE)
_JSON_TEXT_COLUMNS = (MESSAGES, TOOLS)
"""Columns kept as JSON text, which preserves values, nulls and the order of keys."""
_ROWS_AT_A_TIME = 1000
"""Rows of a JSON file in one table."""
_MAX_THREADS = 8
_CHUNKS_AT_A_TIME = 64
"""Chunks of a column that a thread validates at a time."""
_DESCRIPTION = "dataset_info.json"
_JSON_ROWS = "json_rows"
"""Format of `JsonRows`."""
_UNFINISHED = ".incomplete"
"""Suffix of a folder that a process is still writing."""
_LOCK = "_builder.lock"
"""Suffix of the file that the process locks meanwhile."""
_CACHE_VARIABLE = "HF_DATASETS_CACHE"
"""Environment variable that names the cache's folder."""
_T = TypeVar("_T")
Read = tuple[datasets.Dataset, Origin]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Damage:
    row: int
    """Counted from 0."""
    column: str
    reason: str


def read_jsonl(paths: list[Path], layout: Layout, key: str) -> Read:
    columns = layout.columns
    try:
        filled = [(path, schema) for path in paths if (schema := json_schema(path)) is not None]
        files = [path for path, _ in filled]
        require_rows(files, key, paths)
        for path, schema in filled:
            require_columns(layout, plain(schema), f"{key}={summarize(path)}")
        origin = of_lines(files)
        with reading(key, *paths, way_out="check that all files are complete"):
            dataset = convert(
                _JSON_ROWS,
                files,
                list(columns),
                f"{key}={summarize(paths)}",
                origin,
                columns=columns,
                whole_rows=layout.whole_rows,
            )
    except RowError as error:
        raise DataError(f"{key}={error}") from error
    return selected(dataset, layout, key, *paths), origin


def require_rows(filled: list[Path], key: str, paths: list[Path]) -> None:
    """Raise DataError if no file has rows, which `datasets` cannot convert."""
    if not filled:
        raise DataError(f"{key}={summarize(paths)}: no documents; the files have no rows")


def selected(dataset: datasets.Dataset, layout: Layout, key: str, *value: object) -> datasets.Dataset:
    """Select the layout's columns and give them our names. Raises DataError if one is missing."""
    require_columns(layout, dataset.data.schema, f"{key}={summarize(value)}")
    columns = columns_in(layout, [dataset.data.schema])
    renamed = {name: column for name, column in columns.items() if name != column}
    return dataset.select_columns(list(columns)).rename_columns(renamed)


def columns_in(layout: Layout, schemas: Sequence[pa.Schema]) -> Mapping[str, str]:
    """Return the columns to read, as the user's name → ours.

    Whole rows have each column that all schemas have with the same type.
    """
    layout_columns = layout.columns
    if not layout.whole_rows:
        return layout_columns
    first, *other_schemas = schemas
    extra = [
        field
        for field in first
        if field.name not in layout_columns
        and first.names.count(field.name) == 1
        and is_known(field)
        and all(field.name in schema.names and schema.field(field.name).type == field.type for schema in other_schemas)
    ]
    return {**layout_columns, **{field.name: ROW + field.name for field in extra}}


def is_known(field: pa.Field) -> bool:
    """Return whether `datasets` has a type for a column. It has none for maps, unions and UUIDs."""
    try:
        datasets.Features.from_arrow_schema(pa.schema([field]))
    except Exception:  # `datasets` raises various errors for unknown types
        return False
    return True


def convert(
    format: str,
    paths: list[Path],
    checked: list[str],
    source: str,
    origin: Origin,
    prepare: Callable[[], None] = lambda: None,
    **options: object,
) -> datasets.Dataset:
    """Return the files' rows from the cache of `datasets`; convert them if they are missing or damaged there.

    checked: columns to validate. source: the files' name in messages. prepare: called before a conversion. Raises
    DataError for a damaged row, StorageError if the cache cannot be written to or stays locked, and the reader's
    errors.
    """
    # `datasets` takes paths as glob patterns; these are file names.
    files = {"train": [glob.escape(str(path)) for path in paths]}
    with _quiet(), writing(_cache_folder(), _CACHE_VARIABLE):
        open_builder: Callable[..., datasets.DatasetBuilder] = partial(datasets.load_dataset_builder, format)
        if format == _JSON_ROWS:  # without this name `datasets` would name its folders after this module
            open_builder = partial(JsonRows, dataset_name=_JSON_ROWS)
        builder = retry_after_repair(partial(open_builder, data_files=files, **options), format)
        await_turn(Path(f"{builder.cache_dir}{_LOCK}"), _CACHE_VARIABLE)
        mode = "reuse_dataset_if_exists"
        if Path(builder.cache_dir, _DESCRIPTION).exists():
            if not _is_damaged(builder, checked):
                return builder.as_dataset(split="train")
            _log.warning("%s is damaged; %s is converted again", builder.cache_dir, summarize(paths))
            mode = "force_redownload"
        prepare()
        require_room(_cache_folder(), 1, "the converted data", instead=elsewhere(_CACHE_VARIABLE))
        builder.download_and_prepare(download_mode=mode)
        dataset = builder.as_dataset(split="train")
    require_intact(_columns_of(dataset, checked), source, origin)
    return dataset


def _cache_folder() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE)


def retry_after_repair(make: Callable[[], _T], below: str) -> _T:
    """Call `make`. If damaged parts of the cache of `datasets` prevent it, remove them and call it again.

    below: glob pattern of the cache's folders that it may use.
    """
    try:
        return make()
    except Exception:  # `datasets` raises anything on damaged content
        if not _forget_damaged(below):
            raise
        return make()


def _forget_damaged(below: str) -> bool:
    """Remove conversions whose description is not a JSON object; return whether there were any."""
    descriptions = _cache_folder().glob(f"{below}/**/{_DESCRIPTION}")
    damaged = [file for file in descriptions if file.parent.suffix != _UNFINISHED and not _is_object(file)]
    for file in damaged:
        _log.warning("%s is damaged; its data is converted again", file)
        with suppress(FileNotFoundError):  # another process removes it too
            shutil.rmtree(file.parent)
    return bool(damaged)


def _is_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False
    except OSError:  # such as another user's file, which this run must not remove
        return True


def _is_damaged(builder: datasets.DatasetBuilder, columns: list[str]) -> bool:
    try:
        builder.download_and_prepare()  # rereads the description, which another process may just have written
        return first_damage(_columns_of(builder.as_dataset(split="train"), columns)) is not None
    except Exception:  # `datasets` raises anything on files that are cut, absent or of another type
        return True


def _columns_of(dataset: datasets.Dataset, names: list[str]) -> pa.Table:
    table = dataset.data.table
    return table.select([name for name in names if name in table.column_names])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence `datasets` inside: errors it logs are also raised."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def require_intact(table: pa.Table, source: str, origin: Origin) -> None:
    """Raise DataError, with the place of the first damaged row, for a column that cannot be read safely."""
    if damage := first_damage(table):
        raise DataError(
            f"{source}: {origin(damage.row)} has a damaged {damage.column!r}: {damage.reason}; write or download the "
            "file again"
        )


def first_damage(table: pa.Table) -> _Damage | None:
    """Return the first damaged row of the first damaged column, or None if all are sound."""
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as threads:
        return next(_iter_damage(threads, table), None)


def _iter_damage(threads: ThreadPoolExecutor, table: pa.Table) -> Iterator[_Damage]:
    def first_bad_chunk(chunks: list[pa.Array]) -> int | None:
        return next((i for i, chunk in enumerate(chunks) if problem(chunk) is not None), None)

    for name, column in zip(table.column_names, table.columns, strict=True):
        chunks = [chunk.storage if isinstance(chunk, pa.ExtensionArray) else chunk for chunk in column.chunks]
        groups = [chunks[i : i + _CHUNKS_AT_A_TIME] for i in range(0, len(chunks), _CHUNKS_AT_A_TIME)]
        for group, bad in enumerate(threads.map(first_bad_chunk, groups)):
            if bad is not None:
                i = group * _CHUNKS_AT_A_TIME + bad
                row = _first_bad_row(chunks[i])
                reason = problem(chunks[i].slice(row, 1)) or problem(chunks[i]) or ""
                yield _Damage(sum(map(len, chunks[:i])) + row, name, reason)


def problem(values: pa.Array) -> str | None:
    """Return why the values are not valid, or None if they are."""
    try:
        values.validate(full=True)
    except pa.ArrowInvalid as error:
        return " ".join(str(error).split())
    return None


def _first_bad_row(values: pa.Array) -> int:
    """Find the first invalid row by bisection."""
    sound, unsound = 0, len(values)
    while unsound - sound > 1:
        middle = (sound + unsound) // 2
        if problem(values.slice(0, middle)) is None:
            sound = middle
        else:
            unsound = middle
    return sound


@dataclass
class _Config(datasets.BuilderConfig):
    columns: Mapping[str, str] = field(default_factory=dict)
    """The user's name of a column → ours."""
    whole_rows: bool = False
    """Whether to read all other columns, too."""


class JsonRows(datasets.ArrowBasedBuilder):
    """A builder of datasets from JSON files. Raises RowError for a row that cannot be read."""

    VERSION = datasets.Version("1.0.0")
    BUILDER_CONFIG_CLASS = _Config

    def _info(self) -> datasets.DatasetInfo:
        return datasets.DatasetInfo()

    def _split_generators(self, dl_manager: object) -> list[datasets.SplitGenerator]:
        files = [Path(file) for file in self.config.data_files["train"]]
        fixed = {
            name: pa.string()
            for name, ours in self.config.columns.items()
            if ours in (*_STRING_COLUMNS, *_JSON_TEXT_COLUMNS)
        }
        types = fixed
        if self.config.whole_rows or len(fixed) < len(self.config.columns):
            types = self._read_types(files) | fixed
        self.info.features = datasets.Features.from_arrow_schema(pa.schema(types.items()))
        return [datasets.SplitGenerator("train", gen_kwargs={"files": files})]

    def _read_types(self, files: list[Path]) -> dict[str, pa.DataType]:
        """Infer, from all rows, the types of the columns without a fixed type."""
        rows = (row for _, row in chain.from_iterable(map(json_rows, files)))
        types = column_types(rows)
        names = types if self.config.whole_rows else self.config.columns
        return {name: pa.string() if pa.types.is_null(types[name]) else types[name] for name in names if name in types}

    def _generate_tables(self, files: list[Path]) -> Iterator[tuple[int, pa.Table]]:
        schema = self.info.features.arrow_schema
        strings = [name for name, ours in self.config.columns.items() if ours in _STRING_COLUMNS]
        key, rows = 0, []
        for file in files:
            for place, row in json_rows(file):
                for name in strings:
                    if not isinstance(row.get(name), str | None):
                        raise RowError.of(file, place, f"{name!r} is not a string but {repr(row[name])[:60]}")
                rows.append(row)
                if len(rows) == _ROWS_AT_A_TIME:
                    yield key, self._table(rows, schema)
                    key, rows = key + 1, []
        if rows:
            yield key, self._table(rows, schema)

    def _table(self, rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
        return pa.table([self._array([row.get(column.name) for row in rows], column) for column in schema], schema)

    def _array(self, values: list[Any], column: pa.Field) -> pa.Array:
        if isinstance(column.type, pa.JsonType):
            texts = [None if value is None else _json(value) for value in values]
            return pa.ExtensionArray.from_storage(column.type, pa.array(texts, column.type.storage_type))
        if column.type == pa.string():
            write = _json if self.config.columns.get(column.name) in _JSON_TEXT_COLUMNS else answer_text
            values = [value if isinstance(value, str | None) else write(value) for value in values]
        return pa.array(values, column.type)


_json = partial(json.dumps, ensure_ascii=False)
