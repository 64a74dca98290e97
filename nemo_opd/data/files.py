"""Resolution of paths, globs and demo references to files."""

import glob
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

from nemo_opd.demo import DEMO_PREFIX, arithmetic, corpus, is_demo
from nemo_opd.demo.corpus import Split
from nemo_opd.errors import DataError


def resolve_files(entries: Iterable[str], *, key: str) -> list[Path]:
    """Resolve paths, globs (`**` is recursive, matches are sorted) and demo references to files, in the given order.

    Raises DataError, naming `key` and the entry, for a missing path, a glob without matches, or a folder.
    """
    return [path for entry in entries for path in _resolve(entry, key)]


def _resolve(entry: str, key: str) -> list[Path]:
    if is_demo(entry):
        return [_demo_file(entry, key)]
    path = Path(entry).expanduser()
    if path.is_file():
        return [path.absolute()]
    if path.is_dir():
        raise DataError(f"{key}={entry!r} is a folder; name its files, for example {str(path / '*')!r}")
    if not glob.has_magic(entry):
        raise DataError(f"{key}={entry!r} does not exist{_base_folder_note(path)}; correct the path")
    matches = sorted(match for name in glob.glob(str(path), recursive=True) if (match := Path(name)).is_file())
    if not matches:
        raise DataError(
            f"{key}={entry!r} matches no file{_base_folder_note(path)}; correct the pattern (`**` goes into subfolders)"
        )
    return [match.absolute() for match in matches]


def _demo_file(entry: str, key: str) -> Path:
    if not key.endswith("arrow_files"):
        raise DataError(f"{key}={entry!r}: the demo data are Arrow files; put {entry!r} under arrow_files")
    name = entry.removeprefix(DEMO_PREFIX)
    for prefix, files in (("", corpus), ("arithmetic_", arithmetic)):
        for split in get_args(Split):
            if name == f"{prefix}{split}":
                return files.arrow_file(split)
    raise DataError(
        f"{key}={entry!r} is not demo data; use demo:train, demo:validation, demo:arithmetic_train or "
        "demo:arithmetic_validation"
    )


def _base_folder_note(path: Path) -> str:
    return "" if path.is_absolute() else f" (relative to {Path.cwd()})"
