"""A run directory's checkpoints, which are written completely or not at all, found again, and limited in number.

The driver writes a manifest with the size and SHA-256 of every file after all ranks have written, on their shared file
system, so it reads the files as a resumed run will. The hashes equal the output of `sha256sum`.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Event
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from nemo_opd.errors import CheckpointError, DamagedError, first_problem
from nemo_opd.files import (
    files_below,
    move_into_place,
    put_back,
    read_file,
    require_room,
    settle,
    storage_errors,
    sync,
    write_synced,
)
from nemo_opd.progress import Work, working

_NAME = re.compile(r"^step_(\d{6,})$")
TEMPORARY = ".incomplete_"
_DAMAGED = "damaged_"
"""Prefix of a damaged checkpoint that was set aside."""
PROGRESS = "progress.json"
"""File of the driver's part."""
STATE = "state"
"""Folder of the ranks' sharded training state."""
STUDENT = "student"
"""Folder of the student in Hugging Face format."""
MANIFEST = "manifest.json"
_WITH_MANIFEST = 2
"""Format number of checkpoints with a manifest."""
INSTEAD = "choose another run.output_dir, or keep fewer checkpoints (train.keep_last)"
"""Advice for a full disk."""
_NUM_SHOWN = 3
"""Largest number of damaged checkpoints that a message lists."""
_CHUNK = 1 << 22
"""Bytes read at a time."""
_MAX_THREADS = 16
_SHOWN_DIGITS = 16
"""Digits of a hash in a message."""


@dataclass(frozen=True, slots=True)
class BestMetric:
    """Values of the metric that decides which checkpoints are best, or when a run ends."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    by: str = ""
    """The metric, and whether larger or smaller is better; empty if it decides nothing."""
    values: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Progress:
    """The driver's part of a checkpoint."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    step: Annotated[int, Field(ge=0)]
    loader: Mapping[str, int]
    """Position in the order of the data."""
    settings: Mapping[str, object]
    """The settings that must be the same to continue."""
    kd_scale: Mapping[str, float] = field(default_factory=dict)
    """Moving averages of CE and KD for dynamic scaling; empty before the first step."""
    skipped_steps: Mapping[str, int] = field(default_factory=dict)
    """Counts of skipped steps, in total and in a row up to now; empty before the first step."""
    bits_per_byte: Mapping[str, float] = field(default_factory=dict)
    """Values of the untrained student and of each teacher, keyed by logged name, for the final table."""
    best: BestMetric = BestMetric()
    """Steps to keep, with the best values first."""
    stopping: BestMetric = BestMetric()
    """State of early stopping."""
    started_from: str | None = None
    """Folder or hub name of the model that checkpoint from-hf read; None if the run started from student.model."""
    format: Annotated[int, Field(ge=1, le=_WITH_MANIFEST)] = field(default=1, compare=False)
    """Format number that was read; format 1 has no manifest."""


@dataclass(frozen=True, slots=True)
class NewestCheckpoint:
    """The newest complete checkpoint, and damaged newer ones."""

    progress: Progress
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Reasons why newer checkpoints are not used, keyed by step, newest first."""

    def warnings(self, checkpoints: "CheckpointManager") -> Iterator[str]:
        """Yield warnings about damaged and unchecked checkpoints."""
        path = checkpoints.path(self.progress.step)
        for step, reason in self.damaged.items():
            name = checkpoints.path(step).name
            yield f"{reason}; the run continues from {path} instead, and renames this one {_DAMAGED}{name}"
        if self.progress.format < _WITH_MANIFEST:
            yield f"{path} has no {MANIFEST}, because an older version wrote it: its files are read without a check"


class CheckpointManager:
    """The checkpoints `folder/step_000100/`, each complete or absent."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        matches = [_NAME.match(entry.name) for entry in self.folder.iterdir()]
        return sorted(int(match.group(1)) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    @contextmanager
    def writing(self, progress: Progress, estimate: int = 0) -> Iterator[Path]:
        """Yield a temporary folder for the workers' part, which becomes the checkpoint of `progress.step` at the end.

        Requires disk space for the larger of `estimate` bytes and the newest checkpoint's size. On an error the folder
        is removed. Afterwards only the best and the newest `keep_last` checkpoints remain, unless the last step was
        skipped: then the student may have diverged, and an older checkpoint may be needed. Raises CheckpointError if
        the checkpoint cannot be written.
        """
        target = self.path(progress.step)
        temporary = self.folder / f"{TEMPORARY}{target.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        needed = max(estimate, self._newest_size())
        require_room(target, needed, "this checkpoint", instead=INSTEAD, kind=CheckpointError)
        try:
            with storage_errors(target, CheckpointError, needed=needed or None, instead=INSTEAD):
                temporary.mkdir(parents=True)
                sync(self.folder.parent)
                yield temporary
                record = {**asdict(progress), "format": _WITH_MANIFEST}
                if progress.started_from is None:
                    del record["started_from"]  # versions that do not know it can then continue
                (temporary / PROGRESS).write_text(json.dumps(record, indent=1), encoding="utf-8")
                seal(temporary)
                move_into_place(temporary, target)
                if not progress.skipped_steps.get("in_a_row"):
                    self._remove_old(best={int(step) for step in progress.best.values})
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _remove_old(self, best: Container[int]) -> None:
        for step in (step for step in self.steps()[: -self.keep_last] if step not in best):
            # Rename first, so that files that cannot be removed (in use on NFS) do not count as a checkpoint. A
            # checkpoint that cannot even be renamed stays: this must not end a run that has just saved.
            with suppress(OSError):
                old = self.path(step).rename(self.folder / f"{TEMPORARY}{self.path(step).name}")
                shutil.rmtree(old, ignore_errors=True)

    def _newest_size(self) -> int:
        """Return the bytes of the newest checkpoint, or 0 if none can be read."""
        try:
            return read_manifest(self.path(max(self.steps()))).size
        except (ValueError, CheckpointError):
            return 0

    def remove_incomplete(self) -> None:
        """Remove folders that a killed run left half-written or half-removed, and restore one that it was replacing."""
        put_back(self.folder)
        for folder in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it is neither used nor counted in `keep_last`."""
        aside = self.folder / f"{_DAMAGED}{self.path(step).name}"
        with storage_errors(self.path(step), CheckpointError, instead="remove it"):
            move_into_place(self.path(step), aside)

    def newest(self, *, hashed: bool = True) -> NewestCheckpoint | None:
        """Return the newest complete checkpoint, or None without checkpoints.

        hashed: compare hashes in addition to sizes. Raises CheckpointError if all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                return NewestCheckpoint(self.read(step, hashed=hashed), damaged)
            except DamagedError as error:
                damaged[step] = str(error)
        if not damaged:
            return None
        examples = "; ".join([*damaged.values()][:_NUM_SHOWN])
        more = f"; and {len(damaged) - _NUM_SHOWN} more" if len(damaged) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"no checkpoint in {self.folder} is complete: {examples}{more}; copy one there again, or start anew with "
            "another run.output_dir"
        )

    def read(self, step: int, *, hashed: bool = True) -> Progress:
        """Compare a checkpoint's files with its manifest, and read the driver's part.

        Raises DamagedError if a file has changed since it was written, and CheckpointError if permissions forbid
        reading it.
        """
        progress = read_whole(self.path(step), hashed=hashed)
        if progress.step != step:
            raise DamagedError(f"{self.path(step) / PROGRESS} is damaged: it records step {progress.step}")
        return progress


def read_whole(folder: Path, *, hashed: bool = True) -> Progress:
    """Check and read any folder as `CheckpointManager.read` does. Checkpoints without a manifest are not checked."""
    _require_known_format(folder)
    progress = _read_typed(folder / PROGRESS, Progress)
    if progress.format < _WITH_MANIFEST and not (folder / MANIFEST).exists():
        return progress
    manifest = read_manifest(folder)
    try:
        require_sizes(folder, manifest)
        if hashed:
            require_hashes(folder, manifest)
    except PermissionError as error:
        raise CheckpointError(f"{error.filename} cannot be read ({error.strerror}); change its permissions") from error
    except OSError as error:
        raise DamagedError(f"{folder} is damaged: a file cannot be read ({error})") from error
    return progress


def _require_known_format(folder: Path) -> None:
    """Raise CheckpointError if a newer version wrote the checkpoint, which is then not damaged."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads(read_file(folder / PROGRESS, follow_link=True))
        if isinstance(record, dict) and isinstance(version := record.get("format"), int) and version > _WITH_MANIFEST:
            raise CheckpointError(
                f"{folder} was written by a newer version (format {version}; this one reads up to {_WITH_MANIFEST}); "
                "update nemo_opd, or start anew with another run.output_dir"
            )


class _Entry(BaseModel):
    """Size and hash of a file when it was written."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    size: Annotated[int, Field(ge=0)]
    """Bytes of the file."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class _Manifest(BaseModel):
    """The files of a checkpoint, keyed by their paths in it."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    version: Literal[1] = 1
    files: dict[str, _Entry]

    @property
    def size(self) -> int:
        """Total bytes of all files."""
        return sum(entry.size for entry in self.files.values())


def seal(folder: Path) -> None:
    """Wait until the files below `folder` are on disk, and write the manifest. Raises OSError."""
    (folder / MANIFEST).unlink(missing_ok=True)
    settle(folder)
    files = {path.relative_to(folder).as_posix(): path for path in files_below(folder)}
    sizes = {name: path.stat().st_size for name, path in files.items()}
    hashes = _hashes_of(files, sum(sizes.values()), f"hashing {folder.name}")
    manifest = _Manifest(files={name: _Entry(size=sizes[name], sha256=hashes[name]) for name in files})
    write_synced(folder / MANIFEST, json.dumps(manifest.model_dump(), indent=1).encode())
    sync(folder)


def read_manifest(folder: Path) -> _Manifest:
    """Read a checkpoint's manifest. Raises the errors of `_read_typed`."""
    return _read_typed(folder / MANIFEST, _Manifest)


def require_sizes(folder: Path, manifest: _Manifest) -> None:
    """Raise DamagedError, naming the file, if one is missing or its size has changed."""
    for name, entry in manifest.files.items():
        path = folder / name
        if not path.is_file():
            raise DamagedError(f"{folder} is damaged: {name} is missing ({entry.size:,} bytes were written)")
        if (size := path.stat().st_size) != entry.size:
            raise DamagedError(f"{folder} is damaged: {name} has {size:,} bytes, but {entry.size:,} were written")


def require_hashes(folder: Path, manifest: _Manifest) -> None:
    """Raise DamagedError, naming the file, if the content of one has changed."""
    paths = {name: folder / name for name in manifest.files}
    hashes = _hashes_of(paths, manifest.size, f"checking {folder.name}")
    for name, entry in manifest.files.items():
        if hashes[name] != entry.sha256:
            raise DamagedError(
                f"{folder} is damaged: {name} ({entry.size:,} bytes) has the SHA-256 {hashes[name][:_SHOWN_DIGITS]}…, "
                f"but {entry.sha256[:_SHOWN_DIGITS]}… was written"
            )


def _hashes_of(paths: Mapping[str, Path], total: int, what: str) -> dict[str, str]:
    """Return the SHA-256 of each file, keyed by name; several files are read at a time."""
    stop = Event()
    threads = min(_MAX_THREADS, os.cpu_count() or 1)
    with working(what, total, "B") as work, ThreadPoolExecutor(threads) as pool:
        try:
            # Largest first, so that no large file is read alone at the end.
            order = sorted(paths, key=lambda name: -paths[name].stat().st_size)
            digests = pool.map(lambda name: _sha256(paths[name], work, stop), order)
            return dict(zip(order, digests, strict=True))
        except BaseException:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _sha256(path: Path, work: Work, stop: Event) -> str:
    """Return a file's digest. hashlib releases the GIL, so threads run in parallel."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        while not stop.is_set() and (chunk := file.read(_CHUNK)):
            digest.update(chunk)
            work.advance(len(chunk))
    return digest.hexdigest()


_T = TypeVar("_T")


def _read_typed(file: Path, kind: type[_T]) -> _T:
    """Read and validate a JSON file of type `kind`.

    Raises DamagedError, naming the file and the key, if it is missing or invalid, and CheckpointError if permissions
    forbid reading it.
    """
    try:
        return TypeAdapter(kind).validate_json(read_file(file, follow_link=True))
    except ValidationError as error:
        raise DamagedError(f"{file} is damaged: {first_problem(error)}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{file} is missing") from None
    except PermissionError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); change its permissions") from None
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from None
