"""Divergence at each position, for teachers with the student's vocabulary (methods.md §4)."""

from typing import Unpack

from torch import Tensor

from nemo_opd.kernels.forms import Comparison, RowLoss
from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.logits.term import GradientSink, Term, UnitRows, unit_cells
from nemo_opd.losses.arguments import LabelPositions, TokenArguments, check_temperature, over
from nemo_opd.losses.divergence import Divergence, add_comparison
from nemo_opd.losses.support import Support, require_temperature_1, require_whole, split, with_tail_cell

_LIVE_COPIES = 12
"""Tensors of the size of a block's cells that are alive at the memory peak (of jsd, the largest)."""
_LIVE_ROWS = 6
"""Additional tensors of the size of a block's rows, if the cells are not the columns."""


@Loss
def same_vocab(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    divergence: str = "forward_kl",
    temperature: float = 1.0,
    beta: float = 0.5,
    mixed_weight: float = 0.5,
    support: str = "full",
    top_k: int | None = None,
    normalization: str = "rest",
    **shared: Unpack[TokenArguments],
) -> PlannedLoss:
    """Compute τ² · Σ divergence(q, p) / normalizer over scored tokens, and `kd` in nats per token (methods.md §4).

    Unshifted logits [B, S, V] and [B, S, W]; mask [B, S]: token i is scored by the logits at i−1, so token 0 never
    counts; the student may have more positions. Heads wider than the vocabulary (by default the narrower head) are cut
    before any softmax. support, top_k, normalization: see `Support`. A support other than full without the rest cell is
    for parity with other systems only; its loss is not bounded by the full one. Raises ConfigError for shapes, sizes or
    names that do not fit.
    """
    check_temperature(temperature)
    places = LabelPositions.of(student_logits, teacher_logits, takes_truncated=True, **shared)
    compare = Divergence(divergence, beta, mixed_weight)
    columns, size = Support(support, top_k, normalization), places.size
    is_truncated = places.teacher.is_truncated
    require_temperature_1(places.teacher, temperature)
    if not columns.takes_all(size):
        require_whole(places.teacher, f"support={support}", "it chooses tokens at each position")

    ahead = places.teacher_ahead()

    def loss_of(logits: Tensor, part: slice) -> Tensor:
        teacher = over(ahead.of(part).to(logits.dtype), temperature)
        if is_truncated:
            log_t, log_rest = split(teacher)
            return compare.of_logits(*with_tail_cell(log_t, logits, log_rest))
        return columns.compare(compare, teacher, over(logits, temperature))

    def closed_form(rows: UnitRows, part: slice, onto: GradientSink) -> Tensor:
        teacher = UnitRows(ahead.of(part), None)
        return add_comparison(rows.over(temperature), teacher.over(temperature), compare, onto.over(temperature))

    def for_kernels(part: slice) -> Comparison:
        assert measure is not None
        return Comparison(ahead.of(part), temperature, measure)

    takes_all, measure = columns.takes_all(size) and not is_truncated, compare.measure
    row_cells = 0 if takes_all else _LIVE_ROWS * size
    cells = unit_cells(len(places), _LIVE_COPIES * columns.num_cells(size) + row_cells)
    term = Term(
        places.student_rows,
        loss_of,
        cells,
        size,
        weights=places.weights,
        factor=temperature**2,
        chunk_size=places.chunk_size,
        ahead=ahead,
        closed_form=closed_form if takes_all else None,
        row_loss=RowLoss(Comparison, for_kernels) if takes_all and measure is not None else None,
    )
    return PlannedLoss.of("kd", places.student, [term], len(places), places.normalizer)
