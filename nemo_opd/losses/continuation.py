"""What a loss adds for the text of a chunk beyond its first position (METHODS §5)."""

from __future__ import annotations

from dataclasses import replace

from nemo_opd.errors import ConfigError
from nemo_opd.losses.alm import likelihood_term
from nemo_opd.losses.chunk_loss import ChunkInputs
from nemo_opd.losses.planned import PlannedLoss
from nemo_opd.losses.term import Term


def chunk_loss(
    inputs: ChunkInputs,
    term: Term,
    *,
    continuation_weight: float,
    normalizer: float | None,
    chunk_size: int | None,
    count: int | None = None,
) -> PlannedLoss:
    """(term + continuation_weight · `likelihood_term` of chunks of several tokens) / normalizer, and the metric `kd`.

    count: units, by default those of `inputs`; normalizer: by default that number. Raises ConfigError for a negative
    weight.
    """
    if not continuation_weight >= 0:
        raise ConfigError(
            f"continuation_weight={continuation_weight}: a term that is maximised teaches nothing; give 0 or more"
        )
    terms = [term]
    if continuation_weight:
        several = (inputs.units.student_lengths > 1) | (inputs.units.teacher_lengths > 1)
        longer = replace(inputs, units=inputs.units.where(several))
        terms.append(likelihood_term(longer, chunk_size).times(continuation_weight))
    return PlannedLoss.of("kd", inputs.student, terms, len(inputs.units) if count is None else count, normalizer)
