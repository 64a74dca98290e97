"""The file a projection is kept in: safetensors, with what it belongs to in the header."""

from __future__ import annotations

import os
import tempfile
from dataclasses import asdict, dataclass, fields
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nemo_opd.errors import ProjectionError

FORMAT = "nemo_opd.projection"
VERSION = "1"


@dataclass(frozen=True, slots=True)
class Header:
    student_vocab_size: int
    teacher_vocab_size: int
    student_fingerprint: str
    teacher_fingerprint: str
    student_name: str
    """Where the tokenizer was loaded from; a hint for people and tools."""
    teacher_name: str


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    indices: NDArray[np.int32]
    weights: NDArray[np.float32]
    exact: NDArray[np.bool_]


def write(path: str | PathLike[str], header: Header, arrays: Arrays) -> None:
    """Under a name of its own first, then renamed: a reader sees a whole file, whoever else writes.

    Raises ProjectionError where the folder cannot be written to.
    """
    target = Path(path)
    metadata = {"format": FORMAT, "version": VERSION} | {key: str(value) for key, value in asdict(header).items()}
    tensors = {field.name: np.ascontiguousarray(getattr(arrays, field.name)) for field in fields(arrays)}
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(descriptor)
        temporary = Path(name)
        save_file(tensors, temporary, metadata)
        temporary.chmod(0o644)
        temporary.replace(target)
    except (OSError, SafetensorError) as error:
        raise ProjectionError(f"cannot write the projection to {target}: {error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def read(path: str | PathLike[str]) -> tuple[Header, Arrays]:
    """Raises ProjectionError for a file that is missing, damaged or of another format or version."""
    try:
        with safe_open(path, framework="numpy") as file:
            header = _header(path, file.metadata() or {})
            return header, Arrays(**{field.name: file.get_tensor(field.name) for field in fields(Arrays)})
    except OSError as error:
        raise ProjectionError(f"cannot read the projection {path}: {error}") from error
    except (SafetensorError, TypeError, ValueError) as error:
        if isinstance(error, ProjectionError):
            raise
        raise ProjectionError(
            f"{path} is damaged or no projection file ({error}); build it again with tools/projection/build.py"
        ) from error


def _header(path: str | PathLike[str], metadata: dict[str, str]) -> Header:
    if metadata.get("format") != FORMAT:
        raise ProjectionError(
            f"{path} is a safetensors file but no projection; build one with tools/projection/build.py"
        )
    if metadata.get("version") != VERSION:
        raise ProjectionError(
            f"{path} has format version {metadata.get('version')!r}, and this nemo_opd reads version {VERSION!r}; "
            "build it again with tools/projection/build.py"
        )
    try:
        return Header(
            student_vocab_size=int(metadata["student_vocab_size"]),
            teacher_vocab_size=int(metadata["teacher_vocab_size"]),
            student_fingerprint=metadata["student_fingerprint"],
            teacher_fingerprint=metadata["teacher_fingerprint"],
            student_name=metadata["student_name"],
            teacher_name=metadata["teacher_name"],
        )
    except (KeyError, ValueError) as error:
        raise ProjectionError(f"{path} has a damaged header ({error}); build it again") from error
