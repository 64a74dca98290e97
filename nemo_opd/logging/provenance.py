"""provenance.json: the models, the command and the versions of a run, for the cards of what it exports."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from nemo_opd.files import write_atomically
from nemo_opd.models.own_card import OwnCard

_NAME = "provenance.json"


@dataclass(frozen=True, slots=True)
class ModelOrigin:
    """A model that a run is made of."""

    name: str
    """`student`, or the name of a teacher."""
    model: str
    """Hub name, the last part of a path, or what the weights are."""
    tokenizer: str
    vocab_size: int
    """Ids that both tokenizer and model have."""
    card: OwnCard
    weight: float | None = None
    """None for the student, as the next."""
    loss: str | None = None
    audit: tuple[str, ...] = ()
    """Lines on how its vocabulary fits the student's, and warnings about that."""

    @property
    def role(self) -> str:
        return self.name if self.weight is None else f"teacher {self.name}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Models, command and versions of a run, as of its last start."""

    command: str
    versions: dict[str, str]
    """Versions of libraries by name."""
    student: ModelOrigin
    teachers: tuple[ModelOrigin, ...]

    @property
    def models(self) -> tuple[ModelOrigin, ...]:
        return self.student, *self.teachers


_PROVENANCE = TypeAdapter(Provenance)


def write_provenance(output_dir: Path, found: Provenance) -> None:
    write_atomically(output_dir / _NAME, _PROVENANCE.dump_json(found, indent=1) + b"\n")


def read_provenance(output_dir: Path) -> Provenance | None:
    """Return None where the file is missing or damaged, as in a run of an earlier version."""
    try:
        return _PROVENANCE.validate_json((output_dir / _NAME).read_bytes())
    except (OSError, ValidationError):
        return None
