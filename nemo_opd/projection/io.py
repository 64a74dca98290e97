"""The file a projection is kept in: safetensors, with what it belongs to in the header."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from nemo_opd.errors import ProjectionError
from nemo_opd.files import umask_mode
from nemo_opd.projection.options import BuilderOptions

FORMAT = "nemo_opd.projection"
VERSION = "2"
_LARGEST_VOCABULARY = 2**31 - 1
"""Ids are int32."""
_BUILD_AGAIN = "build it again with tools/projection/build.py"


@dataclass(frozen=True, slots=True)
class Header:
    student_vocab_size: int
    teacher_vocab_size: int
    row_width: int
    """K"""
    student_fingerprint: str
    teacher_fingerprint: str
    student_name: str
    """Where the tokenizer was loaded from; a hint for people and tools."""
    teacher_name: str
    options: BuilderOptions


@dataclass(frozen=True, slots=True, eq=False)
class Arrays:
    indices: NDArray[np.int32]
    weights: NDArray[np.float32]
    exact: NDArray[np.bool_]
    byte_prefix: NDArray[np.int32] | None = None
    student_shared_prefix: NDArray[np.int32] | None = None
    teacher_shared_prefix: NDArray[np.int32] | None = None
    teacher_byte_order: NDArray[np.int32] | None = None


def write(path: str | PathLike[str], header: Header, arrays: Arrays) -> None:
    """Under a name of its own first, then renamed: a reader sees a whole file, whoever else writes.

    Raises ProjectionError where the folder cannot be written to.
    """
    target = Path(path)
    tensors = {field.name: getattr(arrays, field.name) for field in fields(arrays)}
    tensors = {name: np.ascontiguousarray(array) for name, array in tensors.items() if array is not None}
    temporary: Path | None = None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
        os.close(descriptor)
        temporary = Path(name)
        save_file(tensors, temporary, _metadata(header, tensors))
        temporary.chmod(umask_mode())
        temporary.replace(target)
    except (OSError, SafetensorError) as error:
        raise ProjectionError(f"cannot write the projection to {target}: {error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)


def read(path: str | PathLike[str]) -> tuple[Header, Arrays]:
    """Raises ProjectionError for a file that is missing, damaged, of another format or version, or lies about itself.

    What the header says of the arrays is compared before any of them is read.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            header = _header(metadata)
            expected = _layout(header, metadata["arrays"].split())
            found = {name: _form(file.get_slice(name)) for name in file.keys()}  # noqa: SIM118 — no mapping
            _compare(expected, found)
            return header, Arrays(**{name: file.get_tensor(name) for name in found})
    except ProjectionError as error:
        raise ProjectionError(f"{path}: {error}; {_BUILD_AGAIN}") from None
    except OSError as error:
        raise ProjectionError(f"cannot read the projection {path}: {error}") from error
    except (SafetensorError, TypeError, ValueError) as error:
        raise ProjectionError(f"{path} is damaged or no projection file ({error}); {_BUILD_AGAIN}") from error


def _metadata(header: Header, tensors: Mapping[str, NDArray[np.generic]]) -> dict[str, str]:
    texts = {field.name: str(getattr(header, field.name)) for field in fields(header) if field.name != "options"}
    own = {"format": FORMAT, "version": VERSION, "options": header.options.to_json(), "arrays": " ".join(tensors)}
    return own | texts


def _header(metadata: Mapping[str, str]) -> Header:
    if metadata.get("format") != FORMAT:
        raise ProjectionError("it is a safetensors file but no projection")
    if metadata.get("version") != VERSION:
        raise ProjectionError(
            f"it has format version {metadata.get('version')!r}, and this nemo_opd reads version {VERSION!r}"
        )
    missing = [name for name in (*(field.name for field in fields(Header)), "arrays") if name not in metadata]
    if missing:
        raise ProjectionError(f"it has a damaged header: {', '.join(missing)} is missing")
    return Header(
        student_vocab_size=_size(metadata, "student_vocab_size"),
        teacher_vocab_size=_size(metadata, "teacher_vocab_size"),
        row_width=_size(metadata, "row_width"),
        student_fingerprint=metadata["student_fingerprint"],
        teacher_fingerprint=metadata["teacher_fingerprint"],
        student_name=metadata["student_name"],
        teacher_name=metadata["teacher_name"],
        options=BuilderOptions.from_json(metadata["options"]),
    )


def _size(metadata: Mapping[str, str], name: str) -> int:
    text = metadata[name]
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _LARGEST_VOCABULARY):
        raise ProjectionError(f"it has a damaged header: {name} is {text[:40]!r}, no size")
    return int(text)


Form = tuple[str, tuple[int, ...]]
"""A dtype by its safetensors name, and a shape."""


def _form(array: object) -> Form:
    return array.get_dtype(), tuple(array.get_shape())  # type: ignore[attr-defined]


def _layout(header: Header, listed: list[str]) -> dict[str, Form]:
    """What the arrays that the header lists must be."""
    num_rows, num_columns = header.student_vocab_size, header.teacher_vocab_size
    known: dict[str, Form] = {
        "indices": ("I32", (num_rows, header.row_width)),
        "weights": ("F32", (num_rows, header.row_width)),
        "exact": ("BOOL", (num_rows,)),
        "byte_prefix": ("I32", (num_columns,)),
        "student_shared_prefix": ("I32", (num_rows,)),
        "teacher_shared_prefix": ("I32", (num_columns,)),
        "teacher_byte_order": ("I32", (num_columns, 3)),
    }
    required = {"indices", "weights", "exact"}
    if not required <= set(listed) <= known.keys():
        raise ProjectionError(f"it has a damaged header: it lists the arrays {', '.join(listed)[:200]!r}")
    return {name: known[name] for name in listed}


def _compare(expected: Mapping[str, Form], found: Mapping[str, Form]) -> None:
    if expected.keys() != found.keys():
        raise ProjectionError(
            f"its header lists {', '.join(sorted(expected))}, but it holds {', '.join(sorted(found))}"
        )
    for name, form in expected.items():
        if found[name] != form:
            raise ProjectionError(
                f"{name} is {found[name][0]} {found[name][1]}, but its header says {form[0]} {form[1]}"
            )
