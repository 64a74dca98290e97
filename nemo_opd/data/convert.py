"""Files as datasets, through the cache of `datasets` (`$HF_DATASETS_CACHE`)."""

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
from nemo_opd.data.schema import shown
from nemo_opd.disk import require_room
from nemo_opd.errors import DataError

_INFO = "dataset_info.json"
_BEING_MADE = ".incomplete"
"""Ends the name of a folder that a process is still writing."""
_LOCK = "_builder.lock"
"""Ends the name of the file that it has locked meanwhile."""
_VARIABLE = "HF_DATASETS_CACHE"
_BUILDERS: dict[str, Callable[..., datasets.DatasetBuilder]] = {"json_rows": JsonRows}
"""Builders by format, beside those of `datasets`."""
_Made = TypeVar("_Made")
Read = tuple[datasets.Dataset, Origin]

_log = logging.getLogger(__name__)


def require_rows(filled: list[Path], key: str, paths: list[Path]) -> None:
    """Raise DataError without rows, which `datasets` refuses to convert."""
    if not filled:
        raise DataError(f"{key}={shown(paths)}: no documents; the files have no rows")


def convert(
    format: str,
    paths: list[Path],
    checked: list[str],
    source: str,
    origin: Origin,
    prepare: Callable[[], None] = lambda: None,
    **options: object,
) -> datasets.Dataset:
    """Return the rows of the files, intact in these columns, from the cache of `datasets`; made anew where damaged.

    source: what messages call the files. prepare: is called before files are converted. Raises DataError for a damaged
    row, StorageError where the cache cannot be written to or stays locked, and what the reader of the format raises.
    """
    # `datasets` takes paths for patterns; these are files.
    files = {"train": [glob.escape(str(path)) for path in paths]}
    with _quiet(), writing(_cache_folder(), _VARIABLE):
        open_builder = _BUILDERS.get(format, partial(datasets.load_dataset_builder, format))
        builder = healed(partial(open_builder, data_files=files, **options), format)
        await_turn(Path(f"{builder.cache_dir}{_LOCK}"), _VARIABLE)
        mode = "reuse_dataset_if_exists"
        if Path(builder.cache_dir, _INFO).exists():
            if not _is_damaged(builder, checked):
                return builder.as_dataset(split="train")
            _log.warning("%s is damaged; %s is converted again", builder.cache_dir, shown(paths))
            mode = "force_redownload"
        prepare()
        require_room(_cache_folder(), 1, "what is converted", instead=elsewhere(_VARIABLE))
        builder.download_and_prepare(download_mode=mode)
        dataset = builder.as_dataset(split="train")
    require_intact(_columns_of(dataset, checked), source, origin)
    return dataset


def _cache_folder() -> Path:
    return Path(datasets.config.HF_DATASETS_CACHE)


def healed(make: Callable[[], _Made], below: str) -> _Made:
    """Return what `datasets` makes; where damaged parts of its cache prevent that, remove them and try again.

    below: pattern of the folders of the cache that it may be in.
    """
    try:
        return make()
    except Exception:  # whatever it makes of what it reads there
        if not _forget_damaged(below):
            raise
        return make()


def _forget_damaged(below: str) -> bool:
    """Remove conversions whose description is no JSON object; return whether there were any."""
    descriptions = _cache_folder().glob(f"{below}/**/{_INFO}")
    found = [file for file in descriptions if file.parent.suffix != _BEING_MADE and not _is_object(file)]
    for file in found:
        _log.warning("%s is damaged; what it describes is converted again", file)
        with suppress(FileNotFoundError):  # another process removes it too
            shutil.rmtree(file.parent)
    return bool(found)


def _is_object(file: Path) -> bool:
    try:
        return isinstance(json.loads(file.read_bytes()), dict)
    except (ValueError, RecursionError):
        return False
    except OSError:  # another user's, say: not for this run to remove
        return True


def _is_damaged(builder: datasets.DatasetBuilder, columns: list[str]) -> bool:
    try:
        builder.download_and_prepare()  # reads the description that another process may just have written
        return first_damage(_columns_of(builder.as_dataset(split="train"), columns)) is not None
    except Exception:  # what `datasets` raises for files that are cut, absent or of another type
        return True


def _columns_of(dataset: datasets.Dataset, names: list[str]) -> pa.Table:
    table = dataset.data.table
    return table.select([name for name in names if name in table.column_names])


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence `datasets` inside: its log of an error is in the error too."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def selected(dataset: datasets.Dataset, layout: Layout, key: str, *value: object) -> datasets.Dataset:
    layout.require_columns(dataset.data.schema, f"{key}={shown(value)}")
    columns = columns_in(layout, [dataset.data.schema])
    renamed = {name: column for name, column in columns.items() if name != column}
    return dataset.select_columns(list(columns)).rename_columns(renamed)
