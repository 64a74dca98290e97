"""User-defined loss: a function of rows of logits."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, Unpack

from torch import Tensor

from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import LabelPositions, TokenArguments, next_tokens
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs, first_position_term
from nemo_opd.losses.support import require_whole
from nemo_opd.users_code import imported

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_FORM = "package.module:function"
_LIVE_COPIES = 8
"""Assumed number of tensors of the size of both sides' rows at a user function's memory peak."""
_OPTIONAL = ("student_ids", "teacher_ids", "projection")
"""Optional parameters of a user function, in addition to the logits."""


@Loss
def token_function(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    function: str,
    arguments: Mapping[str, Any] | None = None,
    ids: Tensor,
    **shared: Unpack[TokenArguments],
) -> PlannedLoss:
    """Compute Σ function(student, teacher) / normalizer over scored tokens, for teachers with the student's vocabulary.

    function: `package.module:function`, called with both sides' logits [U, V] at U positions and keyword `arguments`.
    If it has parameters `student_ids` and `teacher_ids`, it also gets the next tokens [U]. It returns [U],
    differentiable in the student's logits, and must not depend on how positions are split into calls. ids [B, S].
    Raises ConfigError if the function cannot be imported or called like this, or returns another shape.
    """
    formula = _Formula(function, arguments or {})
    places = LabelPositions.of(student_logits, teacher_logits, **shared)
    ahead, next_ids = places.teacher_ahead(), next_tokens(ids, places.rows)

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        tokens = next_ids[part]
        return formula(logits, ahead.of(part).to(logits.dtype), student_ids=tokens, teacher_ids=tokens)

    cells = unit_cells(len(places), _LIVE_COPIES * 2 * places.size)
    weights, rows = places.weights, places.student_rows
    term = Term(rows, loss_of, cells, places.size, weights=weights, chunk_size=places.chunk_size, ahead=ahead)
    return PlannedLoss.of("kd", places.student, [term], len(places), places.normalizer)


@Loss
def chunk_function(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    function: str,
    arguments: Mapping[str, Any] | None = None,
    projection: ProjectionMatrix,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute Σ function(student, teacher) / normalizer over aligned chunks, for a teacher with another vocabulary.

    As `token_function`, with logits [U, V] and [U, W] at each chunk's first position and each side's next tokens; a
    parameter `projection` gets the ProjectionMatrix.
    """
    formula = _Formula(function, arguments or {})
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=1.0, projection=projection, **shared)
    require_whole(inputs.teacher, "loss.type", "this loss needs the whole distribution")
    units = inputs.units
    student_next = next_tokens(inputs.student_ids, units.student_rows)
    teacher_next = next_tokens(inputs.teacher_ids, units.teacher_rows)

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        ids = {"student_ids": student_next[part], "teacher_ids": teacher_next[part]}
        return formula(student, teacher, **ids, projection=projection)

    cells = _LIVE_COPIES * (inputs.student_size + inputs.teacher_size)
    term = first_position_term(inputs, unit_loss, cells_per_unit=cells)
    return inputs.planned([term])


class _Formula:
    """A user's function with its arguments, called with those optional parameters that it declares."""

    def __init__(self, reference: str, arguments: Mapping[str, Any]) -> None:
        self._reference, self._arguments = reference, arguments
        self._function, self._optional = _users_function(reference)
        try:
            optional = dict.fromkeys(self._optional)
            inspect.signature(self._function).bind(None, None, **optional, **arguments)
        except TypeError as error:
            raise ConfigError(
                f"loss.function={reference}: called with logits of student and teacher and loss.arguments="
                f"{dict(arguments)}, but it takes {inspect.signature(self._function)} ({error}); correct either"
            ) from None

    def __call__(self, student: Tensor, teacher: Tensor, **available: Any) -> Tensor:
        optional = {name: available.get(name) for name in self._optional}
        losses = self._function(student, teacher, **optional, **self._arguments)
        shape = list(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != [len(student)]:
            raise ConfigError(
                f"loss.function={self._reference}: returned {shape} for {len(student)} rows of logits; return a "
                f"tensor with one loss per row, [{len(student)}]"
            )
        return losses


@cache
def _users_function(reference: str) -> tuple[Callable[..., Any], tuple[str, ...]]:
    """Import `package.module:function`; return it with the optional parameters that it declares.

    Raises ConfigError if it cannot be imported or is not a function.
    """
    function = imported(reference, key="loss.function", form=_FORM)
    if not inspect.isroutine(function):
        raise ConfigError(f"loss.function={reference}: {type(function).__name__} is not a function; name one")
    names = inspect.signature(function).parameters
    return function, tuple(name for name in _OPTIONAL if name in names)


def check_function(reference: str, arguments: Mapping[str, Any]) -> None:
    """Raise ConfigError if a function cannot be imported or called, before a run starts."""
    _Formula(reference, arguments)
