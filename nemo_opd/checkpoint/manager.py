"""The checkpoints of a run directory: written whole or not at all, found again, limited in number."""

import json
import re
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import ConfigDict, Field

from nemo_opd.checkpoint.manifest import MANIFEST, read_manifest, read_typed, require_hashes, require_sizes, seal
from nemo_opd.disk import require_room, storage_errors
from nemo_opd.errors import CheckpointError, DamagedError
from nemo_opd.files import sync

_NAME = re.compile(r"^step_(\d{6,})$")
TEMPORARY = ".incomplete_"
_DAMAGED = "damaged_"
"""Prefix of a damaged checkpoint that a run did not continue from."""
PROGRESS = "progress.json"
_WITH_MANIFEST = 2
"""Format of checkpoints with a manifest."""
INSTEAD = "choose another run.output_dir, or keep fewer checkpoints (train.keep_last)"
"""Advice for a full disk."""
_NUM_SHOWN = 3
"""Damaged checkpoints that a message lists, at most."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """Values of a metric by which is chosen what is best, or when a run ends."""

    __pydantic_config__: ClassVar = ConfigDict(extra="forbid", strict=True)

    by: str = ""
    """The metric, and whether larger or smaller is better; empty where nothing was chosen."""
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
    """Counts of skipped steps: in total, and in a row up to now; empty before the first step."""
    bits_per_byte: Mapping[str, float] = field(default_factory=dict)
    """Values of the student before training and of each teacher, for the closing table."""
    best: Chosen = Chosen()
    """Steps with the best values, which are kept; the best first."""
    stopping: Chosen = Chosen()
    """State of early stopping."""
    format: Annotated[int, Field(ge=1, le=_WITH_MANIFEST)] = field(default=1, compare=False)
    """Format as it was read; 1 has no manifest."""


@dataclass(frozen=True, slots=True)
class Found:
    """The newest whole checkpoint, and the damage of newer ones."""

    progress: Progress
    damaged: Mapping[int, str] = field(default_factory=dict)
    """Step → reason why it is not used, newest first."""

    def warnings(self, checkpoints: "CheckpointManager") -> Iterator[str]:
        """Yield warnings about the choice."""
        taken = checkpoints.path(self.progress.step)
        for step, reason in self.damaged.items():
            name = checkpoints.path(step).name
            yield f"{reason}; the run continues from {taken} instead, and renames this one {_DAMAGED}{name}"
        if self.progress.format < _WITH_MANIFEST:
            yield f"{taken} has no {MANIFEST}, for an older version wrote it: its files are read without a check"


class CheckpointManager:
    """Checkpoints `folder/step_000100/`, each complete or absent."""

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

        estimate: bytes that are needed at least; the size of the newest checkpoint is needed as well. An error inside
        leaves no trace. Afterwards only the newest `keep_last` and the best ones remain, unless the last step was
        skipped: then the student may have diverged, and an older one may be needed. Raises CheckpointError where it
        cannot be written.
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
                (temporary / PROGRESS).write_text(json.dumps(record, indent=1), encoding="utf-8")
                seal(temporary)
                shutil.rmtree(target, ignore_errors=True)
                temporary.rename(target)
                sync(self.folder)
                if not progress.skipped_steps.get("in_a_row"):
                    self._keep_the_newest(best={int(step) for step in progress.best.values})
        finally:
            shutil.rmtree(temporary, ignore_errors=True)

    def _keep_the_newest(self, best: Container[int]) -> None:
        for step in (step for step in self.steps()[: -self.keep_last] if step not in best):
            # Renamed first, so that what cannot be removed (files in use on NFS) is no checkpoint any more. One that
            # cannot be renamed either stays, since it is no reason to end a run that has just saved.
            with suppress(OSError):
                old = self.path(step).rename(self.folder / f"{TEMPORARY}{self.path(step).name}")
                shutil.rmtree(old, ignore_errors=True)

    def _newest_size(self) -> int:
        """Return the bytes of the newest checkpoint; 0 where there is none."""
        try:
            return read_manifest(self.path(max(self.steps()))).size
        except (ValueError, CheckpointError):
            return 0

    def remove_incomplete(self) -> None:
        """Remove what a killed run left half-written or half-removed."""
        for folder in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(folder, ignore_errors=True)

    def set_aside(self, step: int) -> None:
        """Rename a damaged checkpoint, so that it is neither used nor counted in `keep_last`."""
        aside = self.folder / f"{_DAMAGED}{self.path(step).name}"
        with storage_errors(self.path(step), CheckpointError, instead="remove it"):
            shutil.rmtree(aside, ignore_errors=True)
            self.path(step).rename(aside)
            sync(self.folder)

    def newest(self, *, hashed: bool = True) -> Found | None:
        """Return the newest whole checkpoint; None where there are no checkpoints.

        hashed: compare hashes in addition to sizes. Raises CheckpointError where all are damaged.
        """
        damaged: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                return Found(self.read(step, hashed=hashed), damaged)
            except DamagedError as error:
                damaged[step] = str(error)
        if not damaged:
            return None
        shown = "; ".join([*damaged.values()][:_NUM_SHOWN])
        more = f"; and {len(damaged) - _NUM_SHOWN} more" if len(damaged) > _NUM_SHOWN else ""
        raise CheckpointError(
            f"no checkpoint in {self.folder} is whole: {shown}{more}; copy one there again, or start anew with another "
            "run.output_dir"
        )

    def read(self, step: int, *, hashed: bool = True) -> Progress:
        """Compare a checkpoint's files with its manifest, and read the driver's part.

        Raises DamagedError where a file is not as it was written, CheckpointError where permissions forbid reading it.
        """
        progress = read_whole(self.path(step), hashed=hashed)
        if progress.step != step:
            raise DamagedError(f"{self.path(step) / PROGRESS} is damaged: step: it is {progress.step} there")
        return progress


def _require_known_format(folder: Path) -> None:
    """Raise CheckpointError for a checkpoint that a newer version wrote: it is not damaged."""
    with suppress(OSError, ValueError, RecursionError):
        record = json.loads((folder / PROGRESS).read_bytes())
        if isinstance(record, dict) and isinstance(version := record.get("format"), int) and version > _WITH_MANIFEST:
            raise CheckpointError(
                f"{folder} was written by a newer version (format {version}; this one reads up to {_WITH_MANIFEST}); "
                "update nemo_opd, or start anew with another run.output_dir"
            )


def read_whole(folder: Path, *, hashed: bool = True) -> Progress:
    """Check and read any folder as `CheckpointManager.read` does; older versions wrote no manifest to compare with."""
    _require_known_format(folder)
    progress = read_typed(folder / PROGRESS, Progress)
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
