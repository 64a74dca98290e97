"""Likelihood term for chunks with several tokens, added to first-position losses (methods.md §5.2)."""

from __future__ import annotations

from dataclasses import replace

from nemo_opd.errors import ConfigError
from nemo_opd.logits.planned import PlannedLoss
from nemo_opd.logits.term import Term
from nemo_opd.losses.alm import likelihood_term
from nemo_opd.losses.chunk_loss import ChunkInputs


def chunk_loss(
    inputs: ChunkInputs, term: Term, *, continuation_weight: float, single_units: int | None = None
) -> PlannedLoss:
    """Plan (term + continuation_weight · `likelihood_term` of chunks with several tokens) / normalizer, and `kd`.

    single_units: number of units of `term` if it skips chunks with several tokens; those then count as units only if
    the weight is above 0. By default `term` has all units of `inputs`. Raises ConfigError for a negative weight.
    """
    if not continuation_weight >= 0:
        raise ConfigError(f"continuation_weight={continuation_weight} would maximise the term; give 0 or more")
    terms, count = [term], len(inputs.units) if single_units is None else single_units
    if continuation_weight:
        longer = replace(inputs, units=inputs.units.where(inputs.units.have_several_tokens))
        terms.append(likelihood_term(longer).times(continuation_weight))
        count += 0 if single_units is None else len(longer.units)
    return inputs.planned(terms, count)
