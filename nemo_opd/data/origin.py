"""Places of rows in a source's files, for messages."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nemo_opd.data.lines import is_json_list, json_rows, numbered

Origin = Callable[[int], str]
"""Index of a row, counted from 0 over all files → its place."""


def of_source(index: int) -> str:
    """Describe a row of a source without files."""
    return f"row {index} (counted from 0)"


def of_rows(files: Sequence[Path], counts: Sequence[int]) -> Origin:
    """Return a function that names a row's file and the row in it. counts: number of rows of each file."""

    def place(index: int) -> str:
        remaining = index
        for file, count in zip(files, counts, strict=True):
            if remaining < count:
                return f"row {index} (counted from 0 over all files: row {remaining} of {str(file)!r})"
            remaining -= count
        return of_source(index)

    return place


def of_lines(files: Sequence[Path], plain: Sequence[Path]) -> Origin:
    """Return a function that names a row's file and line, counted from 1. plain: uncompressed copy of each file.

    It reads the files only when it is called.
    """

    def place(index: int) -> str:
        remaining = index
        for file, readable in zip(files, plain, strict=True):
            places = (place for place, _ in json_rows(readable)) if is_json_list(readable) else _lines(readable)
            for name in places:
                if not remaining:
                    return f"row {index} (counted from 0 over all files: {name} of {str(file)!r})"
                remaining -= 1
        return of_source(index)

    return place


def _lines(path: Path) -> Iterator[str]:
    return (f"line {number}" for number, line in numbered(path) if line.strip())
