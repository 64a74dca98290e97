"""The checkpoints of one run directory: written whole, found again, kept in number."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from nemo_opd.checkpoint.manifest import (
    MANIFEST,
    read_manifest,
    require_hashes,
    require_sizes,
    seal,
)
from nemo_opd.checkpoint.typed import read_typed
from nemo_opd.disk import require_room, storage_errors
from nemo_opd.errors import CheckpointError, DamagedError
from nemo_opd.files import sync

NAME = re.compile(r"^step_(\d{6,})$")
TEMPORARY = ".incomplete_"
DAMAGED = "damaged_"
"""Before the name of a checkpoint that a run did not continue from."""
PROGRESS = "progress.json"
WITH_MANIFEST = 2
"""Format of checkpoints that have a manifest."""
INSTEAD = "choose another run.output_dir, or keep fewer checkpoints (train.keep_last)"
"""What to do about a full disk."""
NUM_TOLD = 3
"""Most damaged checkpoints that are listed in a message."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The driver's part of a checkpoint; the workers write theirs beside it."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    step: Annotated[int, Field(ge=0)]
    loader: Mapping[str, int]
    """State of the data order."""
    settings: Mapping[str, object]
    """The settings that must be the same to continue."""
    kd_scale: Mapping[str, float] = field(default_factory=dict)
    """Moving averages of CE and KD (dynamic scaling); empty before the first step."""
    skipped_steps: Mapping[str, int] = field(default_factory=dict)
    """Steps that were not taken, in all and in a row at the end; empty before the first step."""
    bits_per_byte: Mapping[str, float] = field(default_factory=dict)
    """Of the student before training and of each teacher, for the closing table."""
    format: Annotated[int, Field(ge=1, le=WITH_MANIFEST)] = field(default=1, compare=False)
    """As it was read; 1 is that of a version which wrote no manifest."""


@dataclass(frozen=True, slots=True)
class Found:
    """The newest checkpoint that is whole, and what is wrong with those after it."""

    progress: Progress
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Step → why it is not taken; the newest first."""

    def warnings(self, checkpoints: "CheckpointManager") -> Iterator[str]:
        """What is to be said of the choice."""
        taken = checkpoints.path(self.progress.step)
        for step, reason in self.damaged.items():
            name = checkpoints.path(step).name
            yield f"{reason}; the run continues from {taken} instead, and renames this one {DAMAGED}{name}"
        if self.progress.format < WITH_MANIFEST:
            yield f"{taken} has no {MANIFEST}, for an older version wrote it: its files are read without a check"


class CheckpointManager:
    """`folder/step_000100/`, each complete or absent."""

    def __init__(self, folder: Path, keep_last: int) -> None:
        self.folder = folder
        self.keep_last = keep_last

    def steps(self) -> list[int]:
        """Steps of the complete checkpoints, ascending."""
        if not self.folder.is_dir():
            return []
        matches = [NAME.match(entry.name) for entry in self.folder.iterdir()]
        return sorted(int(match.group(1)) for match in matches if match)

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step:06d}"

    @contextmanager
    def writing(self, progress: Progress, estimate: int = 0) -> Iterator[Path]:
        """A temporary folder for the workers' part, which becomes the checkpoint of `progress.step` at the end.

        estimate: bytes that it will have, at least; the size of the checkpoint before counts as well. An error inside
        leaves no trace. Afterwards only the newest `keep_last` checkpoints remain, unless the last step was not taken:
        then the student may have diverged already, and an older one is needed. Raises CheckpointError where it cannot
        be written.
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
                record = {**asdict(progress), "format": WITH_MANIFEST}
                (temporary / PROGRESS).write_text(json.dumps(record, indent=1), encoding="utf-8")
                seal(temporary)
                shutil.rmtree(target, ignore_errors=True)
                temporary.rename(target)
                sync(self.folder)
                if not progress.skipped_steps.get("in_a_row"):
                    self._keep_the_newest()
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _keep_the_newest(self) -> None:
        for step in self.steps()[: -self.keep_last]:
            # Renamed first: what cannot be removed, as files in use on NFS, is no checkpoint any more. One that cannot
            # be renamed either is one too many, and no reason to end a run that has just saved.
            with suppress(OSError):
                old = self.path(step).rename(self.folder / f"{TEMPORARY}{self.path(step).name}")
                shutil.rmtree(old, ignore_errors=True)

    def _newest_size(self) -> int:
        """Bytes; 0 where there is none."""
        try:
            return read_manifest(self.path(max(self.steps()))).size
        except (ValueError, CheckpointError):
            return 0

    def remove_incomplete(self) -> None:
        """Drop what a killed run left half-written or half-removed."""
        for folder in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        """Rename a checkpoint, so that it neither is continued from nor counts among those that are kept."""
        aside = self.folder / f"{DAMAGED}{self.path(step).name}"
        with storage_errors(self.path(step), CheckpointError, instead="remove it"):
            shutil.rmtree(aside, ignore_errors=True)
            self.path(step).rename(aside)
            sync(self.folder)

    def newest(self, *, hashed: bool = True) -> Found | None:
        """The newest checkpoint that is whole; None where there is none at all.

        hashed: compare what files hold, not their sizes alone. Raises CheckpointError where all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                return Found(self.read(step, hashed=hashed), damaged)
            except DamagedError as error:
                damaged[step] = str(error)
        if not damaged:
            return None
        told = "; ".join([*damaged.values()][:NUM_TOLD])
        more = f"; and {len(damaged) - NUM_TOLD} more" if len(damaged) > NUM_TOLD else ""
        raise CheckpointError(
            f"no checkpoint in {self.folder} is whole: {told}{more}; copy one there again, or start anew with another "
            "run.output_dir"
        )

    def read(self, step: int, *, hashed: bool = True) -> Progress:
        """Compare a checkpoint's files with its manifest, and read the driver's part.

        Raises DamagedError where one is not as it was written, and CheckpointError where one may not be read.
        """
        progress = read_whole(self.path(step), hashed=hashed)
        if progress.step != step:
            raise DamagedError(f"{self.path(step) / PROGRESS} is damaged: step: it is {progress.step} there")
        return progress


def require_known_format(folder: Path) -> None:
    """Raise CheckpointError for a checkpoint that a newer version wrote: it is not damaged."""
    with suppress(OSError, ValueError, RecursionError):
        said = json.loads((folder / PROGRESS).read_bytes())
        if isinstance(said, dict) and isinstance(version := said.get("format"), int) and version > WITH_MANIFEST:
            raise CheckpointError(
                f"{folder} was written by a newer version (format {version}; this one reads up to {WITH_MANIFEST}); "
                "update nemo_opd, or start anew with another run.output_dir"
            )


def read_whole(folder: Path, *, hashed: bool = True) -> Progress:
    """As `CheckpointManager.read`, of any folder. Those of older versions have no manifest to compare with."""
    require_known_format(folder)
    progress = read_typed(folder / PROGRESS, Progress)
    if progress.format < WITH_MANIFEST and not (folder / MANIFEST).exists():
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
