"""provenance.json: models, command and versions of a run, for the cards of exported models."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nemo_opd.files import write_atomically
from nemo_opd.models.own_card import OwnCard

_NAME = "provenance.json"


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

    @property
    def models(self) -> tuple[ModelOrigin, ...]:
        return self.student, *self.teachers


_PROVENANCE = TypeAdapter(Provenance)


def write_provenance(output_dir: Path, provenance: Provenance) -> None:
    write_atomically(output_dir / _NAME, _PROVENANCE.dump_json(provenance, indent=1) + b"\n")


def read_provenance(output_dir: Path) -> Provenance | None:
    """Return a run's provenance; None if the file is missing or damaged, as in a run of an earlier version."""
    try:
        return _PROVENANCE.validate_json((output_dir / _NAME).read_bytes())
    except (OSError, ValidationError):
        return None
