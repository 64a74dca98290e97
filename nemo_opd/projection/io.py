"""A projection's safetensors file, whose header names the tokenizers and the options of the build."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from nemo_opd.alignment.token_roles import RoleOverrides
from nemo_opd.errors import ProjectionError, StorageError
from nemo_opd.files import write_atomically

_FORMAT = "nemo_opd.projection"
VERSION = "2"
_LARGEST_VOCABULARY = 2**31 - 1
"""Limit of int32 ids."""
_BUILD_AGAIN = "build it again with nemo-opd projection build"
_REQUIRED_ARRAYS = ("indices", "weights", "exact")
PIECE_ARRAYS = {
    "teacher_spellings": "teacher_spelling_ends",
    "teacher_prefix_pieces": "teacher_prefix_ends",
    "student_bytes": "student_byte_ends",
    "teacher_bytes": "teacher_byte_ends",
}
"""Arrays with their length in the header, each with the array of its ends."""
_ARRAY_NAMES = (
    *_REQUIRED_ARRAYS,
    "byte_prefix",
    "student_shared_prefix",
    "teacher_shared_prefix",
    "student_shared_spelling",
    "teacher_shared_spelling",
    "teacher_byte_order",
    *PIECE_ARRAYS.keys(),
    *PIECE_ARRAYS.values(),
)
_SIZES = ("student_vocab_size", "teacher_vocab_size", "row_width")
_NAMES = ("student_fingerprint", "teacher_fingerprint", "student_name", "teacher_name")

Roles = tuple[tuple[str, tuple[str, ...]], ...]
_Count = Annotated[int, Field(ge=0)]
_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Form = tuple[str, tuple[int, ...]]
"""A dtype, by its safetensors name, and a shape."""


@dataclass(frozen=True, slots=True)
class BuilderOptions:
    """Passes of methods.md §2 that built a matrix, and their settings, which are None if the pass did not run."""

    passes: tuple[str, ...] = ()
    """Names of the passes in the order they ran; empty for a matrix made from arrays."""
    roles: Roles = ()
    """(token content, its roles), ordered by content: the overrides used to pair special tokens."""
    width: _Count | None = None
    """Entries per row of the multi-token pass."""
    decay: _Positive | None = None
    """Weight of a piece relative to the previous one."""
    reverse: bool = False
    """Whether the multi-token pass also re-tokenized the teacher's tokens with the student."""
    embedding_weight: _Positive | None = None
    embedding_temperature: _Positive | None = None
    embedding_width: _Count | None = None
    embedding_anchors: _Count | None = None
    """Number of exact pairs on which the embedding spaces were aligned."""
    top_k: _Count | None = None
    """Entries per row after the cut."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid")

    def after(self, name: str, **changes: Any) -> BuilderOptions:
        """Return these options after another pass; a pass that runs again is listed again."""
        return replace(self, passes=(*self.passes, name), **changes)

    def to_json(self) -> str:
        return _ADAPTER.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> BuilderOptions:
        """Read the output of `to_json`. Raises ProjectionError for anything else."""
        try:
            return _ADAPTER.validate_json(text, strict=True)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            place = ".".join(map(str, first["loc"])) or "builder options"
            raise ProjectionError(f"its builder options are damaged: {place}: {first['msg']}") from None


_ADAPTER = TypeAdapter(BuilderOptions)


def write(path: str | PathLike[str], content: Mapping[str, Any]) -> None:
    """Write the fields of a ProjectionMatrix, keyed by name; the file is complete or absent.

    Raises ProjectionError if the folder cannot be written to.
    """
    arrays: dict[str, NDArray[np.generic]] = {
        name: np.ascontiguousarray(content[name]) for name in _ARRAY_NAMES if content[name] is not None
    }
    num_rows, row_width = content["indices"].shape
    metadata = {"format": _FORMAT, "version": VERSION, "options": content["options"].to_json()}
    metadata |= {"arrays": " ".join(arrays)}
    metadata |= {name: str(len(arrays[name])) for name in PIECE_ARRAYS if name in arrays}
    metadata |= zip(_SIZES, map(str, (num_rows, content["teacher_vocab_size"], row_width)), strict=True)
    metadata |= {name: content[name] for name in _NAMES}
    try:
        write_atomically(Path(path), save(arrays, metadata))
    except StorageError as error:
        raise ProjectionError(f"cannot write the projection to {path}: {error.__cause__}") from error


def read(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the arguments of ProjectionMatrix. Shapes are compared with the header before arrays are read.

    Raises ProjectionError for a file that is missing, damaged, of another format or version, or inconsistent.
    """
    if not Path(path).is_file():
        reason = "it is a folder" if Path(path).is_dir() else "there is no such file"
        raise ProjectionError(f"cannot read the projection {path}: {reason}; correct the path")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            _check_header(metadata)
            forms: dict[str, _Form] = {}
            for name in file.keys():  # noqa: SIM118 — not a mapping
                array = file.get_slice(name)
                forms[name] = array.get_dtype(), tuple(array.get_shape())
            _compare(_expected_forms(metadata), forms)
            arrays = {name: file.get_tensor(name) for name in forms}
            return arrays | {
                "teacher_vocab_size": _size(metadata, "teacher_vocab_size"),
                **{name: metadata[name] for name in _NAMES},
                "options": BuilderOptions.from_json(metadata["options"]),
            }
    except ProjectionError as error:
        raise ProjectionError(f"{path}: {error}; {_BUILD_AGAIN}") from None
    except OSError as error:
        raise ProjectionError(f"cannot read the projection {path}: {error}") from error
    except (SafetensorError, TypeError, ValueError) as error:
        raise ProjectionError(f"{path} is damaged or not a projection file ({error}); {_BUILD_AGAIN}") from error


def _check_header(metadata: Mapping[str, str]) -> None:
    if metadata.get("format") != _FORMAT:
        raise ProjectionError("it is a safetensors file but not a projection")
    if metadata.get("version") != VERSION:
        raise ProjectionError(
            f"it has format version {metadata.get('version')!r}, and this nemo_opd reads version {VERSION!r}"
        )
    missing = [name for name in (*_SIZES, *_NAMES, "options", "arrays") if name not in metadata]
    if missing:
        raise ProjectionError(f"it has a damaged header: {', '.join(missing)} is missing")


def _size(metadata: Mapping[str, str], name: str) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdigit() and len(text) <= 10 and int(text) <= _LARGEST_VOCABULARY):
        raise ProjectionError(f"it has a damaged header: {name} is {text[:40]!r}, not a size")
    return int(text)


def _expected_forms(metadata: Mapping[str, str]) -> dict[str, _Form]:
    """Return the forms of the arrays that the header lists."""
    num_rows, num_columns, row_width = (_size(metadata, name) for name in _SIZES)
    forms: dict[str, _Form] = {
        "indices": ("I32", (num_rows, row_width)),
        "weights": ("F32", (num_rows, row_width)),
        "exact": ("BOOL", (num_rows,)),
        "byte_prefix": ("I32", (num_columns,)),
        "student_shared_prefix": ("I32", (num_rows,)),
        "teacher_shared_prefix": ("I32", (num_columns,)),
        "student_shared_spelling": ("I32", (num_rows,)),
        "teacher_shared_spelling": ("I32", (num_columns,)),
        "teacher_byte_order": ("I32", (num_columns, 3)),
    }
    listed = metadata["arrays"].split()
    for name, ends in PIECE_ARRAYS.items():
        if name in listed:
            num_tokens = num_rows if name == "student_bytes" else num_columns
            forms |= {name: ("I32", (_size(metadata, name),)), ends: ("I32", (num_tokens,))}
    if not set(_REQUIRED_ARRAYS) <= set(listed) <= forms.keys():
        raise ProjectionError(f"it has a damaged header: it lists the arrays {', '.join(listed)[:200]!r}")
    return {name: forms[name] for name in listed}


def _compare(expected: Mapping[str, _Form], actual: Mapping[str, _Form]) -> None:
    if expected.keys() != actual.keys():
        raise ProjectionError(
            f"its header lists {', '.join(sorted(expected))}, but it holds {', '.join(sorted(actual))}"
        )
    for name, form in expected.items():
        if actual[name] != form:
            raise ProjectionError(
                f"{name} is {actual[name][0]} {actual[name][1]}, but its header says {form[0]} {form[1]}"
            )


def frozen_roles(roles: RoleOverrides | None) -> Roles:
    """Return the overrides in canonical form: sorted by token, roles as tuples."""
    return tuple(
        sorted((token, (names,) if isinstance(names, str) else tuple(names)) for token, names in (roles or {}).items())
    )
