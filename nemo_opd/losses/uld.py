"""L1 distance of sorted probabilities, independent of the tokens (methods.md §5.10)."""

from __future__ import annotations

from typing import Unpack

import torch
import torch.nn.functional as F
from torch import Tensor

from nemo_opd.logits.planned import Loss, PlannedLoss
from nemo_opd.logits.rows import LogitRows
from nemo_opd.losses.arguments import check_compat
from nemo_opd.losses.chunk_loss import ChunkArguments, ChunkInputs
from nemo_opd.losses.chunk_merge import Merge
from nemo_opd.losses.support import of_likeliest


@Loss
def uld(
    student_logits: Tensor | LogitRows,
    teacher_logits: Tensor | LogitRows,
    *,
    temperature: float = 1.0,
    compat: str | None = None,
    **shared: Unpack[ChunkArguments],
) -> PlannedLoss:
    """Compute τ² · Σ Σ_r |sort(p)_r − sort(q)_r| / normalizer over chunks, and `kd` per chunk (methods.md §5.10).

    p and q at the rows that predict a chunk's first tokens, sorted in descending order, the shorter padded with zeros.
    compat="trl": both are multiplied by the probabilities of the chunk's later tokens, without the factor τ².
    Raises ConfigError for shapes or sizes that do not fit.
    """
    check_compat(compat, ("trl",))
    inputs = ChunkInputs.of(student_logits, teacher_logits, temperature=temperature, **shared)
    ranks = max(inputs.student_size, inputs.teacher_size)

    def unit_loss(student: Tensor, teacher: Tensor, part: slice) -> Tensor:
        if compat is None:
            student, teacher = student.log_softmax(-1), teacher.log_softmax(-1)
        if inputs.teacher.top_k is not None:
            ranked = of_likeliest(inputs.teacher, inputs.units.teacher_rows[part], teacher)
            return _known_ranks(student, teacher, ranked, inputs.teacher.top_k)
        return (_ranked(student, ranks) - _ranked(teacher, ranks)).abs().sum(-1)

    merge = Merge("first" if compat is None else "observed")
    # An int64 of a sort counts as two numbers.
    cells = 8 * inputs.student_size + 6 * inputs.teacher_size + 4 * ranks
    term = merge.term(inputs, unit_loss, cells_per_unit=cells)
    if compat == "trl":  # TRL does not scale by τ².
        term = term.times(temperature**-2)
    return inputs.planned([term])


def _known_ranks(log_p: Tensor, log_q: Tensor, ranked: Tensor, top_k: int) -> Tensor:
    """Compare the teacher's known ranks one by one and all lower ranks as one cell: [U, V] and [U, W + 1] → [U].

    ranked: [U, W], log-probabilities of tokens with known ranks, otherwise −inf. Fewer than `top_k` ranks are known if
    a server returns rows of its head that are not tokens.
    """
    teacher_log_q = ranked.topk(top_k, dim=-1).values
    is_unknown = teacher_log_q == -torch.inf
    is_ranked = F.pad(ranked > -torch.inf, (0, 1))
    teacher_tail = log_q.masked_fill(is_ranked, -torch.inf).exp().sum(-1)
    student_p = _ranked(log_p, max(top_k, log_p.shape[-1]))
    leading = student_p[:, :top_k]
    by_rank = (leading - teacher_log_q.exp()).abs().masked_fill(is_unknown, 0).sum(-1)
    student_tail = leading.masked_fill(~is_unknown, 0).sum(-1) + student_p[:, top_k:].sum(-1)
    return by_rank + (student_tail - teacher_tail).abs()


def _ranked(log_p: Tensor, ranks: int) -> Tensor:
    """Sort probabilities in descending order and pad with 0: log-probabilities [U, X] → [U, ranks]."""
    probabilities = log_p.exp().sort(-1, descending=True).values
    return F.pad(probabilities, (0, ranks - log_p.shape[-1]))
