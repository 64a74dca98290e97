"""Files as datasets, through the cache of `datasets` (`$HF_DATASETS_CACHE`)."""

import glob
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets

from nemo_opd.data.intact import first_damage
from nemo_opd.data.layout import Layout
from nemo_opd.data.origin import Origin
from nemo_opd.data.schema import shown
from nemo_opd.errors import DataError

INFO = "dataset_info.json"
BEING_MADE = ".incomplete"
"""Ends the name of a folder that a process is still writing."""
Read = tuple[datasets.Dataset, Origin]

_log = logging.getLogger(__name__)


def require_rows(filled: list[Path], key: str, paths: list[Path]) -> None:
    """`datasets` refuses to convert nothing."""
    if not filled:
        raise DataError(f"{key}={shown(paths)}: no documents; the files have no rows")


def convert(
    format: str, paths: list[Path], checked: list[str], prepare: Callable[[], None] = lambda: None, **options: object
) -> datasets.Dataset:
    """Return the rows of the files, from the cache of `datasets`; made anew where that is damaged in these columns.

    prepare: is called before files are converted that are not in the cache.
    """
    # `datasets` takes paths for patterns; these are files.
    files = {"train": [glob.escape(str(path)) for path in paths]}
    with quiet():
        builder = builder_of(format, data_files=files, **options)
        was_made = Path(builder.cache_dir).exists()
        if not was_made:
            prepare()
        builder.download_and_prepare()
        if was_made and _is_damaged(builder, checked):
            _log.warning("%s is damaged; %s is converted again", builder.cache_dir, shown(paths))
            builder.download_and_prepare(download_mode="force_redownload")
        return builder.as_dataset(split="train")


def builder_of(format: str, **options: object) -> datasets.DatasetBuilder:
    """Return what converts files, without the parts of its cache that would keep it from being made."""
    try:
        return datasets.load_dataset_builder(format, **options)
    except Exception:  # whatever it makes of what it reads there
        if not _forget_damaged(format):
            raise
        return datasets.load_dataset_builder(format, **options)


def _forget_damaged(format: str) -> bool:
    """Remove conversions whose description is no JSON object; return whether there were any."""
    descriptions = Path(datasets.config.HF_DATASETS_CACHE).glob(f"{format}/**/{INFO}")
    found = [file for file in descriptions if file.parent.suffix != BEING_MADE and not _is_object(file)]
    for file in found:
        _log.warning("%s is damaged; what it describes is converted again", file)
        shutil.rmtree(file.parent, ignore_errors=True)
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
        table = builder.as_dataset(split="train").data.table
        return first_damage(table.select([name for name in columns if name in table.column_names])) is not None
    except Exception:  # what `datasets` raises for files that are cut, absent or of another type
        return True


@contextmanager
def quiet() -> Iterator[None]:
    """What `datasets` logs of an error is in the error too."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def selected(dataset: datasets.Dataset, layout: Layout, key: str, *value: object) -> datasets.Dataset:
    layout.require_columns(dataset.data.schema, f"{key}={shown(value)}")
    renamed = {name: column for name, column in layout.columns.items() if name != column}
    return dataset.select_columns(list(layout.columns)).rename_columns(renamed)
