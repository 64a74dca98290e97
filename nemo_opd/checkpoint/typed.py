"""JSON files with keys and types that are known."""

from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from nemo_opd.errors import CheckpointError, DamagedError
from nemo_opd.problems import first_problem

T = TypeVar("T")


def read_typed(file: Path, kind: type[T]) -> T:
    """Read a `kind` from a JSON file.

    Raises DamagedError, naming the file and the key, for what is no such thing, and CheckpointError where it may not be
    read.
    """
    try:
        return TypeAdapter(kind).validate_json(file.read_bytes())
    except ValidationError as error:
        raise DamagedError(f"{file} is damaged: {first_problem(error)}") from None
    except (FileNotFoundError, NotADirectoryError):
        raise DamagedError(f"{file} is missing") from None
    except PermissionError as error:
        raise CheckpointError(f"{file} cannot be read ({error.strerror}); change its permissions") from None
    except OSError as error:
        raise DamagedError(f"{file} cannot be read ({error.strerror})") from None
