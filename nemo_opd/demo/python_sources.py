"""The demo corpus: the running interpreter's standard-library sources as Arrow files, built on first use.

All of a source file goes into one split, so no validation document continues a training document.
"""

import hashlib
import os
import platform
import re
import sysconfig
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal, get_args

import pyarrow as pa

from nemo_opd.errors import DataError
from nemo_opd.paths import cache_dir

Split = Literal["train", "validation"]

DOCUMENT_CHARS = 1_000
"""Approximate document length in characters: files are cut at line boundaries into parts of about equal length."""
_VALIDATION_PERCENT = 3
_VALIDATION_SALT = "nemo_opd/"
"""Prefix of the hashed path. With this salt no single file dominates validation."""
_EXCLUDED_FOLDERS = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__", "encodings"}
)
"""Tests, installed packages, and `encodings`: generated character tables, a tenth of the bytes without real code."""
_FORMAT_VERSION = 1
"""Part of the cache key: increase it when the same sources give other documents or splits."""

_ROWS_PER_BATCH = 1_000
_SCHEMA = pa.schema([("text", pa.string()), ("path", pa.string())])
_LINE = re.compile(r"[^\n]*\n|[^\n]+")


@dataclass(frozen=True)
class _SourceFile:
    """A source file, with its `/`-separated path below the root and its size in bytes."""

    path: str
    size: int


@dataclass(frozen=True)
class _Document:
    """Consecutive lines of one source file."""

    text: str
    path: str


def arrow_file(split: Split) -> Path:
    """Return the Arrow stream file of a split, with rows `{text, path}`; build both splits if absent.

    Raises DataError if the split does not exist or the interpreter has no sources. Safe in concurrent processes: each
    writes under its own name, and renames the same bytes into place.
    """
    if split not in get_args(Split):
        raise DataError(f"data demo:{split} is not demo data; choose from demo:train, demo:validation")
    root = Path(sysconfig.get_paths()["stdlib"])
    sources = source_files(root)
    folder = cache_dir("demo", cache_key(sources))
    path = folder / f"{split}.arrow"
    if not path.exists():
        build(root, sources, folder)
    return path


def build(root: Path, sources: list[_SourceFile], folder: Path) -> None:
    """Write `train.arrow` and `validation.arrow` into `folder`, each atomically. Raises DataError if one is empty."""
    for split in get_args(Split):
        split_sources = [source for source in sources if _split_of(source.path) == split]
        if not split_sources:
            raise DataError(
                f"data demo:{split} has no source files: {root} holds {len(sources)} usable *.py files;"
                " install the interpreter's standard library as sources, or name your own files in data.*"
            )
        table = _table(document for source in split_sources for document in _documents(root, source))
        write_stream(folder / f"{split}.arrow", table, _ROWS_PER_BATCH)


def write_stream(path: Path, table: pa.Table, rows_per_batch: int | None = None) -> None:
    """Write an Arrow stream. Safe in concurrent processes: each writes under its own name, then renames the file."""
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        with pa.OSFile(str(partial), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_per_batch)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def source_files(root: Path) -> list[_SourceFile]:
    """Return the *.py files below `root` outside _EXCLUDED_FOLDERS, sorted by path."""
    sources = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _EXCLUDED_FOLDERS]
        paths = [Path(folder, name) for name in names if name.endswith(".py")]
        sources += [_SourceFile(p.relative_to(root).as_posix(), p.stat().st_size) for p in paths if p.is_file()]
    return sorted(sources, key=lambda source: source.path)


def cache_key(sources: list[_SourceFile]) -> str:
    """Return a key of the interpreter's version and sources, equal for equal files on every machine."""
    digest = hashlib.sha256(f"{_FORMAT_VERSION} {DOCUMENT_CHARS} {_VALIDATION_PERCENT}".encode())
    for source in sources:
        digest.update(f"\n{source.path}\0{source.size}".encode("utf-8", "surrogateescape"))
    return f"python-{platform.python_version()}-{digest.hexdigest()[:12]}"


def _split_of(path: str) -> Split:
    """Choose the split of a source file by a hash of its path below the root."""
    digest = hashlib.sha256((_VALIDATION_SALT + path).encode("utf-8", "surrogateescape")).digest()
    return "validation" if int.from_bytes(digest[:4], "big") % 100 < _VALIDATION_PERCENT else "train"


def _documents(root: Path, source: _SourceFile) -> Iterator[_Document]:
    """Yield the documents of a file, which together contain every line once; none if it is blank or not UTF-8."""
    try:
        text = (root / source.path).read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return
    if text.strip():
        yield from (_Document(part, source.path) for part in cut(text))


def cut(text: str) -> list[str]:
    """Split a text at line boundaries into parts of about equal length, at most about DOCUMENT_CHARS characters."""
    num_parts = -(-len(text) // DOCUMENT_CHARS)

    def part_of(line: re.Match[str]) -> int:
        return line.start() * num_parts // len(text)

    return ["".join(line[0] for line in lines) for _, lines in groupby(_LINE.finditer(text), key=part_of)]


def _table(rows: Iterator[_Document]) -> pa.Table:
    return pa.Table.from_pylist([{"text": row.text, "path": row.path} for row in rows], schema=_SCHEMA)
