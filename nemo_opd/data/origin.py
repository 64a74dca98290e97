"""Places of rows in the files of a source, for messages."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from nemo_opd.data.lines import is_json_list, json_rows, numbered

Origin = Callable[[int], str]
"""Index of a row, counted from 0 over all files → its place."""


def of_source(index: int) -> str:
    """Name a row of a source without files."""
    return f"row {index} (counted from 0)"


def of_rows(files: Sequence[Path], counts: Sequence[int]) -> Origin:
    """Name the file of a row and the row in it. counts: rows of each file."""

    def place(index: int) -> str:
        rest = index
        for file, count in zip(files, counts, strict=True):
            if rest < count:
                return f"row {index} (counted from 0 over all files: row {rest} of {str(file)!r})"
            rest -= count
        return of_source(index)

    return place


def of_lines(files: Sequence[Path], plain: Sequence[Path]) -> Origin:
    """Name the file of a row and its line, counted from 1. plain: where the lines of each file are uncompressed.

    The files are read only when a row is asked for.
    """

    def place(index: int) -> str:
        rest = index
        for file, readable in zip(files, plain, strict=True):
            places = (place for place, _ in json_rows(readable)) if is_json_list(readable) else _lines(readable)
            for name in places:
                if not rest:
                    return f"row {index} (counted from 0 over all files: {name} of {str(file)!r})"
                rest -= 1
        return of_source(index)

    return place


def _lines(path: Path) -> Iterator[str]:
    return (f"line {number}" for number, line in numbered(path) if line.strip())
