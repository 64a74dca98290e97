"""Places of rows in the files of a source, for messages."""

from collections.abc import Callable, Sequence
from pathlib import Path

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
            with readable.open("rb") as lines:
                for number, line in enumerate(lines, start=1):
                    if not line.strip():
                        continue
                    if not rest:
                        return f"row {index} (counted from 0 over all files: line {number} of {str(file)!r})"
                    rest -= 1
        return of_source(index)

    return place
