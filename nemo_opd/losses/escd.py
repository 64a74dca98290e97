"""Teacher by first pieces, and completion of the tokens that the student has begun (methods.md §5.13)."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Unpack

from torch import Tensor

from nemo_opd.distributed.transfer import compute_on_host
from nemo_opd.errors import ConfigError, ProjectionError
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import Term, unit_cells
from nemo_opd.losses.arguments import over
from nemo_opd.losses.cells import CommonCells, common_cells_term
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.completions import CompletionUnits
from nemo_opd.losses.divergence import Divergence
from nemo_opd.losses.prefixes import ADD_MAPS
from nemo_opd.losses.support import split

if TYPE_CHECKING:
    from nemo_opd.projection import ProjectionMatrix

_COPIES_OF_STUDENT, _COPIES_OF_TEACHER, _COPIES_PER_TOKEN = 4, 3, 8
"""fp32 numbers at the memory peak of a block, per column of a row or per token of a set."""


@Loss
def escd(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    projection: ProjectionMatrix,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    completion_weight: float = 1.0,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ [divergence(u, p) − completion_weight · Σ_g M_g log P_g] / normalizer over chunks, and `kd`.

    u(v) = Σ q over the teacher tokens whose longest prefix among the student's tokens is v, with a rest cell if both
    sides have other tokens. g runs over groups of teacher tokens without an equal student token whose common beginning
    goes on after the chunk's first student token. M_g is the group's probability before the chunk, P_g the student's
    probability, after that token, of the tokens that complete the beginning (methods.md §5.13). Its minimum is not 0.

    Raises ConfigError for shapes, sizes or names that do not fit, ProjectionError for a projection without the map or
    the bytes of tokens.
    """
    if not completion_weight >= 0:
        raise ConfigError(f"completion_weight={completion_weight} would unlearn completions; give 0 or more")
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, projection=projection, **shared)
    if projection.byte_prefix is None:
        raise ProjectionError(f"escd needs the map byte_prefix, {ADD_MAPS}")
    cells = CommonCells.of_prefixes(projection.byte_prefix, inputs.student_size, inputs.teacher_size, inputs.device)
    terms = [common_cells_term(inputs, cells, Divergence(divergence, beta, mixed_weight))]
    if completion_weight:
        units = CompletionUnits.of(inputs, projection, shared["student_chunk_id"])
        terms.append(_completion_term(inputs, units).times(completion_weight * temperature**2))
    return inputs.planned(terms)


def _completion_term(inputs: ChunkInputs, completions: CompletionUnits) -> Term:
    """Build −Σ M log P at the position after each chunk's first student token.

    Its units are all chunks, also those without completions, so that it shares the teacher's rows with the first term.
    """
    temperature, rows = inputs.temperature, inputs.units.student_rows
    ahead = inputs.teacher_ahead(inputs.units.teacher_rows)

    def loss_of(student: Tensor, part: slice) -> Tensor:
        teacher = over(ahead.of(part).to(inputs.dtype), temperature)
        log_q = split(teacher)[0] if inputs.is_truncated else teacher.log_softmax(1)
        return completions.surprise(over(student, temperature).log_softmax(1), log_q, part)

    cells = unit_cells(
        len(inputs.units),
        _COPIES_OF_STUDENT * inputs.student_size + _COPIES_OF_TEACHER * inputs.teacher_size,
        (completions.unit_offsets(completions.member_offsets), _COPIES_PER_TOKEN),
        (completions.unit_offsets(completions.completion_offsets), _COPIES_PER_TOKEN),
    )
    (following,) = compute_on_host(lambda rows: [rows + 1], rows)
    return replace(inputs.term(following, loss_of, cells, ahead=ahead), recorded_at=following)
