"""Conversion of files to datasets, in the cache of `datasets` (`$HF_DATASETS_CACHE`)."""

import glob
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TypeVar

import datasets
import pyarrow as pa

from nemo_opd.data.caches import await_turn, elsewhere, writing
from nemo_opd.data.intact import first_damage, require_intact
from nemo_opd.data.json_rows import JsonRows
from nemo_opd.data.layout import Layout
from nemo_opd.data.origin import Origin
from nemo_opd.data.row_layout import columns_in
from nemo_opd.data.schema import summarize
from nemo_opd.disk import require_room
from nemo_opd.errors import DataError

_INFO = "dataset_info.json"
_UNFINISHED = ".incomplete"
"""Suffix of a folder that a process is still writing."""
_LOCK = "_builder.lock"
"""Suffix of the file that the process locks meanwhile."""
_VARIABLE = "HF_DATASETS_CACHE"
_BUILDERS: dict[str, Callable[..., datasets.DatasetBuilder]] = {"json_rows": JsonRows}
"""Builders keyed by format, beyond those of `datasets`."""
_T = TypeVar("_T")
Read = tuple[datasets.Dataset, Origin]

_log = logging.getLogger(__name__)


def require_rows(filled: list[Path], key: str, paths: list[Path]) -> None:
    """Raise DataError if no file has rows, which `datasets` cannot convert."""
    if not filled:
        raise DataError(f"{key}={summarize(paths)}: no documents; the files have no rows")


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
    with _quiet(), writing(_cache_folder(), _VARIABLE):
        open_builder = _BUILDERS.get(format, partial(datasets.load_dataset_builder, format))
        builder = retry_after_repair(partial(open_builder, data_files=files, **options), format)
        await_turn(Path(f"{builder.cache_dir}{_LOCK}"), _VARIABLE)
        mode = "reuse_dataset_if_exists"
        if Path(builder.cache_dir, _INFO).exists():
            if not _is_damaged(builder, checked):
                return builder.as_dataset(split="train")
            _log.warning("%s is damaged; %s is converted again", builder.cache_dir, summarize(paths))
            mode = "force_redownload"
        prepare()
        require_room(_cache_folder(), 1, "the converted data", instead=elsewhere(_VARIABLE))
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
    descriptions = _cache_folder().glob(f"{below}/**/{_INFO}")
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


def selected(dataset: datasets.Dataset, layout: Layout, key: str, *value: object) -> datasets.Dataset:
    """Select the layout's columns and give them our names. Raises DataError if one is missing."""
    layout.require_columns(dataset.data.schema, f"{key}={summarize(value)}")
    columns = columns_in(layout, [dataset.data.schema])
    renamed = {name: column for name, column in columns.items() if name != column}
    return dataset.select_columns(list(columns)).rename_columns(renamed)
