"""Import of projections that NeMo-RL's tools wrote: `.pt` files, read without running anything they contain.

There are two forms: `{"indices": [V, K], "likelihoods": [V, K]}` with −1 in empty places, and `{(student id, teacher
id): weight or count}`. The first may name its models (`student_model_id`, formerly `model_A_id`) and may declare
`enable_scale_trick`: its last column is then a scale factor at an arbitrary id, not part of the map.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from nemo_opd.alignment.pieces import name_of, pieces_of
from nemo_opd.alignment.token_roles import RoleOverrides
from nemo_opd.errors import ProjectionError
from nemo_opd.files import require_uncompressed
from nemo_opd.projection.exact import exact_map
from nemo_opd.projection.io import BuilderOptions, frozen_roles
from nemo_opd.projection.matrix import IMPORTERS, Entries, ProjectionMatrix, assemble

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PASS = "nemo_rl"
"""Name of the pass in the builder options of an imported matrix."""
_MAX_VOCAB = 2**22
"""Limit of ids, beyond any tokenizer's; a matrix takes memory for its largest student id."""
MAX_WIDTH = 32
"""Number of heaviest entries kept per row: NeMo-RL's default width. Count files have rows of hundreds."""
_RELATED = 0.5
"""Share of rows that must lead to a token with bytes in common; with less, the file is of another pair."""

_FORMS = "expected the keys 'indices' and 'likelihoods', or pairs (student id, teacher id) as keys"
_BUILD = "or build it with nemo-opd projection build"


@dataclass(frozen=True, slots=True, eq=False)
class _Content:
    """A sparse map as coordinates, in any order; entries may repeat."""

    student: NDArray[np.int64]
    teacher: NDArray[np.int64]
    weights: NDArray[np.float64]
    num_rows: int
    student_name: str = ""
    teacher_name: str = ""


def read(path: str | PathLike[str]) -> ProjectionMatrix:
    """Read a projection without fingerprints and exact flags, which the file does not contain; `bind` adds them.

    Rows are normalised, repeated entries are summed, and the heaviest MAX_WIDTH are kept in order. Raises
    ProjectionError for a file that is missing, damaged, in another form, or that would run code.
    """
    loaded = _load(path)
    try:
        return _matrix(_content(loaded))
    except ProjectionError as error:
        raise ProjectionError(f"{path} is not a usable NeMo-RL projection: {error}") from None


def bind(
    matrix: ProjectionMatrix,
    student_tokenizer: PreTrainedTokenizerBase,
    teacher_tokenizer: PreTrainedTokenizerBase,
    *,
    roles: RoleOverrides | None = None,
) -> ProjectionMatrix:
    """Make `matrix` the projection of this pair: its sizes and fingerprints, and exact rows found by bytes and role.

    NeMo-RL's rows follow the model's padded head: empty rows beyond the tokenizer are cut, missing rows are empty.
    Raises ProjectionError for a matrix of another pair.
    """
    exact = exact_map(student_tokenizer, teacher_tokenizer, roles=roles)
    rows, columns = exact.student_vocab_size, exact.teacher_vocab_size
    used = np.flatnonzero(matrix.row_lengths)
    if len(used) and used[-1] >= rows:
        raise ProjectionError(
            f"row {used[-1]} has entries, but the student's tokenizer has {rows} ids; name the tokenizers of this pair"
        )
    if matrix.teacher_vocab_size > columns:
        raise ProjectionError(
            f"an entry leads to teacher id {matrix.teacher_vocab_size - 1}, but the teacher's tokenizer has {columns} "
            "ids; name the tokenizers of this pair"
        )
    indices = np.full((rows, matrix.top_k), -1, np.int32)
    weights = np.zeros((rows, matrix.top_k), np.float32)
    num_copied = min(rows, matrix.student_vocab_size)
    indices[:num_copied], weights[:num_copied] = matrix.indices[:num_copied], matrix.weights[:num_copied]
    _check_related(indices, student_tokenizer, teacher_tokenizer)
    is_single = (indices >= 0).sum(axis=1) == 1
    return ProjectionMatrix(
        indices,
        weights,
        exact.exact & is_single & (indices[:, 0] == exact.indices[:, 0]),
        teacher_vocab_size=columns,
        student_fingerprint=exact.student_fingerprint,
        teacher_fingerprint=exact.teacher_fingerprint,
        student_name=name_of(student_tokenizer),
        teacher_name=name_of(teacher_tokenizer),
        options=replace(matrix.options, roles=frozen_roles(roles)),
    )


def load(
    path: str | PathLike[str],
    student_tokenizer: PreTrainedTokenizerBase | None,
    teacher_tokenizer: PreTrainedTokenizerBase | None,
) -> ProjectionMatrix:
    """Read a file and `bind` it to given tokenizers. Raises ProjectionError as these do, and for a lone tokenizer."""
    matrix = read(path)
    if student_tokenizer is None and teacher_tokenizer is None:
        return matrix
    if student_tokenizer is None or teacher_tokenizer is None:
        raise ProjectionError(
            f"{path} names no tokenizers, so it is checked against both tokenizers or none; give both"
        )
    try:
        return bind(matrix, student_tokenizer, teacher_tokenizer)
    except ProjectionError as error:
        raise ProjectionError(f"{path} was made for other tokenizers: {error}") from None


IMPORTERS[".pt"] = IMPORTERS[".pth"] = load


def _check_related(
    indices: NDArray[np.int32], student_tokenizer: PreTrainedTokenizerBase, teacher_tokenizer: PreTrainedTokenizerBase
) -> None:
    student, teacher = pieces_of(student_tokenizer).as_list(), pieces_of(teacher_tokenizer).as_list()
    text = [(student[s], teacher[t]) for s, t in enumerate(indices[:, 0].tolist()) if t >= 0 and student[s]]
    related = sum(bool(theirs) and (theirs in ours or ours in theirs) for ours, theirs in text)
    if related < _RELATED * len(text):
        raise ProjectionError(
            f"only {related} of {len(text)} rows lead to a teacher token with bytes in common, so it is the projection "
            f"of another pair than {name_of(student_tokenizer)} and {name_of(teacher_tokenizer)}; name its tokenizers"
        )


def _load(path: str | PathLike[str]) -> object:
    if not Path(path).is_file():
        raise ProjectionError(f"cannot read the projection {path}: no such file")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about pickle protocols, which do not matter here
            require_uncompressed(Path(path))
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a damaged file may raise anything in the unpickler
        if code := re.search(r"GLOBAL (\S+)", str(error)):
            raise ProjectionError(
                f"{path} names code to run while it is loaded ({code[1]}), which a projection never needs, and was not "
                f"loaded; if you trust it, save it as tensors and plain dicts, {_BUILD}"
            ) from None
        first_sentence = str(error).strip().partition("\n")[0].partition(". ")[0]  # torch's messages are long
        reason = ": ".join(filter(None, (type(error).__name__, first_sentence)))
        raise ProjectionError(
            f"{path} is damaged or not a file of torch.save ({reason}); copy it again, {_BUILD}"
        ) from None


def _content(content: object) -> _Content:
    if not isinstance(content, Mapping):
        raise ProjectionError(f"it holds a {type(content).__name__}; {_FORMS}")
    if "indices" in content and "likelihoods" in content:
        return _dense(content)
    if not content:
        raise ProjectionError(f"it holds an empty dict; {_FORMS}")
    if all(isinstance(key, tuple) and len(key) == 2 for key in content):
        return _counts(content)
    keys = ", ".join(repr(key)[:40] for key in list(content)[:5])
    raise ProjectionError(f"it holds the keys {keys}; {_FORMS}")


def _dense(content: Mapping[object, object]) -> _Content:
    indices, likelihoods = _array(content, "indices"), _array(content, "likelihoods")
    if indices.shape != likelihoods.shape or indices.ndim != 2 or 0 in indices.shape:
        raise ProjectionError(
            f"indices {list(indices.shape)} and likelihoods {list(likelihoods.shape)} must both be [student "
            "vocabulary, top_k]"
        )
    num_rows = len(indices)
    if num_rows > _MAX_VOCAB:
        raise ProjectionError(f"it has {num_rows} rows, more than any vocabulary")
    if indices.dtype.kind != "i":
        raise ProjectionError(f"indices must be integers, not {indices.dtype}")
    if content.get("enable_scale_trick") is True:
        indices, likelihoods = indices[:, :-1], likelihoods[:, :-1]
    rows = np.repeat(np.arange(num_rows), indices.shape[1])
    student, teacher = (_name(content, side) for side in (("student", "A"), ("teacher", "B")))
    flat = indices.reshape(-1).astype(np.int64), likelihoods.reshape(-1).astype(np.float64)
    return _Content(rows, *flat, num_rows, student, teacher)


def _array(content: Mapping[object, object], key: str) -> NDArray[np.generic]:
    tensor = content[key]
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided or tensor.is_quantized:
        raise ProjectionError(f"{key} must be a dense tensor, not {_kind(tensor)}")
    if tensor.dtype.is_complex or tensor.dtype == torch.bool or tensor.device.type != "cpu":
        raise ProjectionError(f"{key} must be a tensor of numbers, not {tensor.dtype} on {tensor.device}")
    # A view that repeats a small storage could claim terabytes.
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        raise ProjectionError(f"{key} is larger than what is stored for it; save it with .contiguous()")
    return (tensor.double() if tensor.is_floating_point() else tensor).detach().numpy()


def _kind(value: object) -> str:
    return f"a {value.layout} tensor" if isinstance(value, torch.Tensor) else f"a {type(value).__name__}"


def _name(content: Mapping[object, object], side: tuple[str, str]) -> str:
    name = content.get(f"{side[0]}_model_id", content.get(f"model_{side[1]}_id"))
    return name if isinstance(name, str) else ""


def _counts(content: Mapping[object, object]) -> _Content:
    for key in content:
        if not all(type(token_id) is int and 0 <= token_id < _MAX_VOCAB for token_id in key):  # type: ignore[attr-defined]
            raise ProjectionError(f"the key {repr(key)[:60]} is not a pair (student id, teacher id)")
    ids = np.array(list(content), np.int64)
    weights = np.array([_weight(key, value) for key, value in content.items()])
    return _Content(ids[:, 0], ids[:, 1], weights, int(ids[:, 0].max()) + 1)


def _weight(key: object, value: object) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1 and value.device.type == "cpu":
        value = value.item()
    if isinstance(value, (int, float)) and abs(value) <= sys.float_info.max:
        return float(value)
    raise ProjectionError(f"the weight of {key} is {repr(value)[:60]}; it must be a finite number")


def _matrix(content: _Content) -> ProjectionMatrix:
    student, teacher, weights = content.student, content.teacher, content.weights
    _reject_rows(content, ~np.isfinite(weights) | (weights < 0), "has a weight that is negative or not finite")
    _reject_rows(content, (teacher < -1) | (teacher >= _MAX_VOCAB), "leads to an id that no teacher has")
    used = (teacher >= 0) & (weights > 0)
    if not used.any():
        raise ProjectionError("no entry has any weight, so nothing could be distilled through it")
    cells = Entries(student[used], teacher[used], weights[used], np.zeros(int(used.sum()), np.bool_))
    indices, shares = assemble(cells, content.num_rows, MAX_WIDTH)
    width = int((indices >= 0).sum(axis=1).max())
    return ProjectionMatrix(
        indices[:, :width],
        shares[:, :width],
        student_name=content.student_name,
        teacher_name=content.teacher_name,
        options=BuilderOptions(passes=(PASS,)),
    )


def _reject_rows(content: _Content, bad: NDArray[np.bool_], reason: str) -> None:
    if bad.any():
        raise ProjectionError(f"row {int(content.student[bad][0])} {reason}")
