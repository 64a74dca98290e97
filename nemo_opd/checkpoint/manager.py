"""The checkpoints of one run directory: written whole, found again, kept in number."""

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from nemo_opd.errors import CheckpointError

NAME = re.compile(r"^step_(\d{6,})$")
TEMPORARY = ".incomplete_"
PROGRESS = "progress.json"


@dataclass(frozen=True, slots=True)
class Progress:
    """The driver's part of a checkpoint; the workers write theirs beside it."""

    step: int
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


def size_of(folder: Path) -> int:
    """Bytes in the files below a folder, some of which may be on their way out."""
    total = 0
    for file in folder.rglob("*"):
        with suppress(OSError):
            total += file.stat().st_size if file.is_file() else 0
    return total


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

    def size_of_newest(self) -> int | None:
        """Bytes of the newest complete checkpoint; None where there is none."""
        steps = self.steps()
        return size_of(self.path(steps[-1])) if steps else None

    @contextmanager
    def writing(self, progress: Progress) -> Iterator[Path]:
        """A temporary folder for the workers' part, which becomes the checkpoint of `progress.step` at the end.

        An error inside leaves no trace. Afterwards only the newest `keep_last` checkpoints remain, unless the last step
        was not taken: then the student may have diverged already, and an older one is needed.
        """
        target = self.path(progress.step)
        temporary = self.folder / f"{TEMPORARY}{target.name}"
        shutil.rmtree(temporary, ignore_errors=True)
        try:
            temporary.mkdir(parents=True)
            yield temporary
            (temporary / PROGRESS).write_text(json.dumps(asdict(progress), indent=1), encoding="utf-8")
            shutil.rmtree(target, ignore_errors=True)
            temporary.rename(target)
        except OSError as error:
            raise CheckpointError(
                f"{target} could not be written ({error}); make room or choose another run.output_dir"
            ) from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        if not progress.skipped_steps.get("in_a_row"):
            for step in self.steps()[: -self.keep_last]:
                shutil.rmtree(self.path(step))

    def remove_incomplete(self) -> None:
        """Drop what a killed run left half-written."""
        for folder in self.folder.glob(f"{TEMPORARY}*"):
            shutil.rmtree(folder)

    def read(self, step: int) -> Progress:
        """Raises CheckpointError where the checkpoint's record is not readable."""
        file = self.path(step) / PROGRESS
        try:
            return Progress(**json.loads(file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{file} cannot be read ({error}); remove {self.path(step)} to continue from the checkpoint before it"
            ) from error
