"""provenance.json of a run: its models, texts, command and versions."""

from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nemo_opd.files import read_file, write_atomically
from nemo_opd.models.folder import OwnCard

PROVENANCE = "provenance.json"
FINISHED = "finished"
NOT_EXPORTED = "finished, not exported"
"""End of a run whose student is worse than before it."""
ENDED_EARLY = "ended early"
"""End before the last step, with a checkpoint."""
INTERRUPTED = "interrupted"
"""End by a second signal, or by a signal at the start."""
FAILED = "failed"


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """A model that a run uses."""

    name: str
    """`student`, or the name of a teacher."""
    model: str
    """Hub name, last part of a path, or a description of the weights."""
    tokenizer: str
    vocab_size: int
    """Number of ids that both tokenizer and model have."""
    card: OwnCard
    weight: float | None = None
    """None for the student, like `loss`."""
    loss: str | None = None
    audit: tuple[str, ...] = ()
    """Lines on how well its vocabulary covers the student's, with warnings."""
    parameters: int | None = None
    """None if unknown."""
    commit: str | None = None
    """Commit of a model from the hub."""

    @property
    def role(self) -> str:
        return self.name if self.weight is None else f"teacher {self.name}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Models, command and versions of a run, at its last start."""

    command: str
    versions: dict[str, str]
    """Versions of libraries by name."""
    student: ModelOrigin
    teachers: tuple[ModelOrigin, ...]
    started_from: str | None = None
    """As in a checkpoint's `Progress`."""
    validation_texts: str | None = None
    """Short hash of the validation texts in order, whatever the models; None without validation."""
    num_texts: int | None = None
    """Number of training texts; None if the student samples them."""
    data_commits: dict[str, str] = field(default_factory=dict)
    """Commits of data sets from the hub, by setting, such as `data.train.hub`."""
    total_steps: int | None = None
    started: str | None = None
    """Date and time of the last start."""
    end: str | None = None
    """End after the last start; None while the run is going, and if it was killed."""

    @property
    def models(self) -> tuple[ModelOrigin, ...]:
        return self.student, *self.teachers


_ADAPTER = TypeAdapter(Provenance)


def write_provenance(output_dir: Path, provenance: Provenance) -> None:
    write_atomically(output_dir / PROVENANCE, _ADAPTER.dump_json(provenance, indent=1) + b"\n")


def record_end(output_dir: Path, end: str) -> None:
    """Record the end of a run, if its folder can still be written."""
    provenance = read_provenance(output_dir)
    if provenance is not None:
        with suppress(OSError):
            write_provenance(output_dir, replace(provenance, end=end))


def read_provenance(output_dir: Path) -> Provenance | None:
    """Return a run's provenance; None if the file is missing or damaged, as in a run of an earlier version."""
    try:
        return _ADAPTER.validate_json(read_file(output_dir / PROVENANCE))
    except (OSError, ValidationError):
        return None
