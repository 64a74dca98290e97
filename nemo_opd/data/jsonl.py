"""Documents from JSONL files, plain or compressed."""

from pathlib import Path

from nemo_opd.data.compressed import uncompressed
from nemo_opd.data.convert import Read, convert, require_rows, selected
from nemo_opd.data.layout import Layout
from nemo_opd.data.lines import RowError, numbered
from nemo_opd.data.origin import of_lines
from nemo_opd.data.row_layout import RowLayout
from nemo_opd.data.schema import json_schema, plain, reading, summarize
from nemo_opd.errors import DataError


def read_jsonl(paths: list[Path], layout: Layout, key: str) -> Read:
    files = {path: file for path in paths if (file := _non_blank_file(path, key))}
    require_rows(list(files), key, paths)
    for path, file in files.items():
        if (schema := json_schema(file)) is not None:
            layout.require_columns(plain(schema), f"{key}={summarize(path)}")
    origin = of_lines(list(files), list(files.values()))
    columns = dict(layout.columns)
    try:
        with reading(key, *paths, way_out="check that all files are complete"):
            dataset = convert(
                "json_rows",
                list(files.values()),
                list(columns),
                f"{key}={summarize(paths)}",
                origin,
                columns=columns,
                whole_rows=isinstance(layout, RowLayout),
            )
    except RowError as error:
        path = next(path for path, file in files.items() if file == error.file)
        raise DataError(f"{key}={summarize(path)}: {error}") from error
    return selected(dataset, layout, key, *paths), origin


def _non_blank_file(path: Path, key: str) -> Path | None:
    """Return the file, unpacked if it is compressed, or None if all its lines are blank."""
    with reading(key, path):
        file = uncompressed(path, f"{key}={summarize(path)}")
        return file if any(line.strip() for _, line in numbered(file)) else None
