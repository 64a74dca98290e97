"""projections.json: rows of learned projections that moved furthest, for the report."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from nemo_opd.disk import storage_errors
from nemo_opd.errors import DataError
from nemo_opd.files import write_atomically

_FILE = "projections.json"


@dataclass(frozen=True, slots=True)
class MovedRow:
    """A student token whose weights of teacher tokens changed."""

    token: str
    """Readable text of the token; entries have such texts too."""
    moved: float
    """½ Σ |after − before|: the share of the weight that moved (methods.md §2.8)."""
    before: tuple[tuple[str, float], ...]
    """Teacher tokens with their weights."""
    after: tuple[tuple[str, float], ...]


_BY_TEACHER: TypeAdapter[Mapping[str, Sequence[MovedRow]]] = TypeAdapter(Mapping[str, Sequence[MovedRow]])


def write_projections(output_dir: Path, by_teacher: Mapping[str, Sequence[MovedRow]]) -> None:
    """Write the rows of each teacher's projection. Raises StorageError if the file cannot be written."""
    with storage_errors(output_dir):
        write_atomically(output_dir / _FILE, _BY_TEACHER.dump_json(by_teacher, indent=1))


def read_projections(output_dir: Path) -> Mapping[str, Sequence[MovedRow]]:
    """Return the rows by teacher; empty if the run learned no projection. Raises DataError if the file is damaged."""
    file = output_dir / _FILE
    if not file.exists():
        return {}
    try:
        return _BY_TEACHER.validate_json(file.read_bytes())
    except ValueError as error:
        raise DataError(f"{file} is damaged: {str(error).splitlines()[0]}; remove it") from error
